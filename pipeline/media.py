"""Media: encoded images and videos to uint8 RGB pixels, and prompts filled, row by row; errors stay in their row.

A plain function on Arrow tables (READ to DECODED), so that it runs wherever CPUs are. Knows Pillow and the prompt; no
model's sizes or normalisation, and videos only as `pipeline.video.clips` has them.
"""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from configs.schema import Source
from pipeline import prompts, rows
from pipeline.asking import Asked, Asking
from pipeline.rows import RowError
from pipeline.sources.uris import Fetcher
from pipeline.video.clips import NO_SPAN, Span, VideoOptions, clip_column, decode_videos, span_columns
from pipeline.video.worker import DecodedClip

# Pillow logs some damage as errors; what is wrong with an image is told by its row.
logging.getLogger("PIL").setLevel(logging.CRITICAL)

MAX_MESSAGE_CHARS = 500
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
"""What is taken for an image; formats that run interpreters or embed files (EPS, PDF, ICO, …) are left out."""

MAX_ASPECT = 200
"""Processors that bring the shorter side to a fixed size would make gigabytes of a thread; Qwen's refuse the same."""

_TURNS = {
    2: (Image.Transpose.FLIP_LEFT_RIGHT,),
    3: (Image.Transpose.ROTATE_180,),
    4: (Image.Transpose.FLIP_TOP_BOTTOM,),
    5: (Image.Transpose.TRANSPOSE,),
    6: (Image.Transpose.ROTATE_270,),
    7: (Image.Transpose.TRANSVERSE,),
    8: (Image.Transpose.ROTATE_90,),
}
"""EXIF orientation to what puts the picture upright (Exif 2.3, tag 0x0112)."""


@dataclass(frozen=True)
class DecodeOptions:
    """How rows are decoded: what they are asked, the pixel limit, the longer side that images are shrunk to (None: as
    is), who fetches images that rows name by URI, and how videos are decoded."""

    asking: Asking
    max_image_pixels: int = 64_000_000
    max_side_px: int | None = None
    fetcher: Fetcher | None = None
    videos: VideoOptions | None = None

    @classmethod
    def of(cls, source: Source, root: str, asking: Asking) -> DecodeOptions:
        """The options of a job on this source, whose root is `root` as a URL."""
        fetcher, videos = Fetcher(source, root), VideoOptions.of(source, root)
        return cls(asking, source.max_image_pixels, source.max_side_px, fetcher, videos)


def decode_image(data: bytes, max_pixels: int, max_side_px: int | None = None) -> NDArray[np.uint8]:
    """One encoded image as uint8 RGB (height, width, 3): upright, alpha over white, first frame of several.

    Raises:
        RowError: `not_an_image`, `image_too_large` (known before any pixel is decoded), `broken_image`,
            `unsupported_image`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(data, max_pixels)
        try:
            with _LIBTIFF if image.format == "TIFF" else nullcontext():
                image.load()
            upright = _to_rgb(image)
            for turn in _TURNS.get(_orientation(image), ()):
                upright = upright.transpose(turn)
        except RowError:
            raise
        except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, EOFError, …
            raise RowError("broken_image", f"the {image.format} image cannot be decoded: {error}") from None
    if max_side_px is not None and max(upright.size) > max_side_px:
        scale = max_side_px / max(upright.size)
        size = (max(1, round(upright.width * scale)), max(1, round(upright.height * scale)))
        upright = upright.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(upright)


def _open(data: bytes, max_pixels: int) -> Image.Image:
    """The image with its header read and its size judged; Pillow's own pixel limit is replaced by ours meanwhile."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        image = Image.open(io.BytesIO(data), formats=_installed_formats())
    except UnidentifiedImageError:
        raise RowError("not_an_image", f"{len(data)} bytes that are no image of a known format") from None
    except Exception as error:  # a header that is recognised and then makes no sense
        raise RowError("broken_image", f"the image's header cannot be read: {error}") from None
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    if image.width * image.height > max_pixels:
        raise RowError(
            "image_too_large",
            f"{image.width} x {image.height} pixels are more than source.max_image_pixels ({max_pixels})",
        )
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise RowError(
            "unsupported_image", f"sides of {image.width} and {image.height} pixels are more than {MAX_ASPECT} to 1"
        )
    return image


class _SilentStderr:
    """Sends file descriptor 2 to nowhere: libtiff writes there by itself about damaged files. One thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saved: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._saved = os.dup(2)
        except OSError:  # closed already: nothing to silence
            self._saved = None
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)

    def __exit__(self, *_: object) -> None:
        if self._saved is not None:
            os.dup2(self._saved, 2)
            os.close(self._saved)
        self._lock.release()


_LIBTIFF = _SilentStderr()


def _installed_formats() -> list[str]:
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _to_rgb(image: Image.Image) -> Image.Image:
    """The loaded image in mode RGB, alpha over white.

    Raises:
        RowError: `unsupported_image` for pixels whose range or colour is not defined.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # 65535 is white; Pillow's own conversion would cut everything above 255 off.
        grey = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F", "LAB", "HSV"):
        message = f"pixels of mode {image.mode!r} ({image.format}) have no agreed range or colour"
        raise RowError("unsupported_image", message)
    if image.has_transparency_data:
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8; 1 where the EXIF block is damaged, which is no reason to lose the picture."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        return 1


@dataclass(frozen=True)
class _Decoded:
    """One row as decoded: `of` is the index of the row that it was made of."""

    of: int
    sample_id: str
    span: Span = NO_SPAN
    images: Sequence[NDArray[np.uint8]] = ()
    videos: Sequence[DecodedClip] = ()
    asked: Asked | None = None
    error: tuple[str, str] = ("", "")


def decode_table(table: pa.Table, options: DecodeOptions) -> pa.Table:
    """Decode every row's images and videos and fill its prompt: READ to DECODED, in the same order.

    As many rows, unless videos are cut into clips or rows have several prompts. A row that arrives with an error
    passes; one that fails here gets its code, no pixels and no messages.
    """
    keep = rows.kept_fields(table.schema)
    codes = table["error_type"].to_pylist()
    asked: list[_Asked | RowError | None] = [
        None if code else _ask(table, index, options) for index, code in enumerate(codes)
    ]
    fetched = _fetch_all([row.images for row in asked if isinstance(row, _Asked)], options)
    decoded: list[_Decoded] = []
    for index, (sample_id, row) in enumerate(zip(table["sample_id"].to_pylist(), asked, strict=True)):
        asked[index] = None  # what is decoded need not stay encoded
        if row is None:
            decoded.append(_Decoded(index, sample_id, error=(codes[index], table["error_message"][index].as_py())))
            continue
        try:
            if isinstance(row, RowError):
                raise row
            decoded += _decode_row(index, sample_id, row, fetched, options)
        except RowError as error:
            message = prompts.whole_text(error.message)[:MAX_MESSAGE_CHARS]
            decoded.append(_Decoded(index, sample_id, error=(error.code, message)))
    taken = pa.array([row.of for row in decoded], pa.int64())
    questions = [row.asked for row in decoded]
    columns = {
        "sample_id": pa.array([row.sample_id for row in decoded], pa.string()),
        **{name: table[name].take(taken) for name in ("source", "row_index")},
        **span_columns([row.span for row in decoded]),
        "prompt_index": pa.array([one and one.index for one in questions], pa.int32()),
        "num_prompts": pa.array([one and one.num_asked for one in questions], pa.int32()),
        "images": image_column([row.images for row in decoded]),
        "videos": clip_column([row.videos for row in decoded]),
        "messages": pa.array(
            [json.dumps(one.messages, ensure_ascii=False) if one else "" for one in questions], pa.string()
        ),
        "sampling": pa.array([one.sampling if one else "" for one in questions], pa.string()),
        "error_type": pa.array([row.error[0] for row in decoded], pa.string()),
        "error_message": pa.array([row.error[1] for row in decoded], pa.string()),
        **{field.name: table[field.name].take(taken) for field in keep},
    }
    return pa.table(columns, schema=rows.decoded_schema(keep))


def decode_missing(table: pa.Table, options: DecodeOptions, present: frozenset[str] = frozenset()) -> pa.Table:
    """`decode_table` without rows that an earlier attempt has made: of one sample some may be there."""
    decoded = decode_table(table, options)
    if not present:
        return decoded
    missing = [sample_id not in present for sample_id in decoded["sample_id"].to_pylist()]
    return decoded.filter(pa.array(missing, pa.bool_()))


@dataclass(frozen=True)
class _Asked:
    """One row's questions, and its media, still encoded, in the order of their places."""

    questions: Sequence[Asked]
    images: Sequence[dict[str, Any]]
    videos: Sequence[dict[str, Any]]


def _ask(table: pa.Table, index: int, options: DecodeOptions) -> _Asked | RowError:
    try:
        fields = json.loads(table["fields"][index].as_py())
        own = table["images"][index].as_py(), table["videos"][index].as_py()
        questions, *media = options.asking.ask(fields, *own)
    except RowError as error:
        return error
    by_uri = [[_NAMED | {"uri": one} if isinstance(one, str) else one for one in cell] for cell in media]
    return _Asked(questions, *by_uri)


_NAMED: dict[str, Any] = dict.fromkeys(("bytes", "uri", "path", "offset", "size"))


def _decode_row(
    index: int, sample_id: str, row: _Asked, fetched: Mapping[str, bytes | RowError], options: DecodeOptions
) -> list[_Decoded]:
    """The rows that one row makes: itself, or one for each clip of its video and each of its prompts."""
    pixels = _decode_all(row.images, fetched, options)
    clips: Sequence[tuple[Span, Sequence[DecodedClip]]] = [(NO_SPAN, ())]
    cuts = False
    if row.videos:
        assert options.videos is not None, "rows have videos, and nobody decodes them"
        clips = decode_videos(row.videos, options.videos)
        cuts = options.videos.sampling.clip_s is not None
    return [
        _Decoded(index, question.name(span.name(sample_id) if cuts else sample_id), span, pixels, frames, question)
        for span, frames in clips
        for question in row.questions
    ]


def _fetch_all(cells: Sequence[Sequence[dict[str, Any]]], options: DecodeOptions) -> dict[str, bytes | RowError]:
    """Bytes or error by URI of all the images that rows name by URI."""
    uris = [image["uri"] for cell in cells for image in cell if image["bytes"] is None]
    if not uris:
        return {}
    assert options.fetcher is not None, "rows name images by URI, and nobody fetches them"
    return options.fetcher.fetch(uris)


def _decode_all(
    cell: Sequence[dict[str, Any]], fetched: Mapping[str, bytes | RowError], options: DecodeOptions
) -> list[NDArray[np.uint8]]:
    decoded = []
    for number, image in enumerate(cell, start=1):
        try:
            data = fetched[image["uri"]] if image["bytes"] is None else image["bytes"]
            if isinstance(data, RowError):
                raise data
            decoded.append(decode_image(data, options.max_image_pixels, options.max_side_px))
        except RowError as error:
            if len(cell) == 1:
                raise
            raise RowError(error.code, f"image {number} of {len(cell)}: {error.message}") from None
    return decoded


def image_column(cells: Sequence[Sequence[NDArray[np.uint8]]]) -> pa.Array:
    """Rows of RGB images (height, width, 3) as a column `list<struct<height, width, rgb>>`."""
    flat = [image for cell in cells for image in cell]
    parts = [
        pa.array([image.shape[0] for image in flat], pa.int32()),
        pa.array([image.shape[1] for image in flat], pa.int32()),
        pa.array([image.tobytes() for image in flat], pa.large_binary()),
    ]
    offsets = np.concatenate([[0], np.cumsum([len(cell) for cell in cells])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.StructArray.from_arrays(parts, fields=list(rows.PIXELS)))


def pixels(cell: Sequence[dict[str, Any]]) -> tuple[NDArray[np.uint8], ...]:
    """One row's images out of the column's Python value: read-only uint8 arrays (height, width, 3)."""
    return tuple(np.frombuffer(image["rgb"], np.uint8).reshape(image["height"], image["width"], 3) for image in cell)
