"""Valid files of every format that a source reads: the beginnings of mutated files."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pyarrow as pa

from tests.pipeline import inputs
from tests.pipeline.formats.shards import tar_bytes
from tests.pipeline.media.pictures.test_named_spaces import avif, png_of
from tests.pipeline.media.pictures.test_other_readers import encoded
from tests.pipeline.media.video.files import encode_video

Bytes = Callable[[bytes], bytes]
PICTURES = {
    "jpeg": (("jpeg-rgb", "p3", 6), "jpg"),
    "jpeg-progressive": (("jpeg-progressive", "none", 1), "jpg"),
    "jpeg-cmyk": (("jpeg-ycck", "none", 1), "jpg"),
    "png-palette": (("png-p-key", "p3", 3), "png"),
    "png-deep": (("png-rgba16", "none", 1), "png"),
    "png-grey": (("png-la", "grey", 1), "png"),
    "webp": (("webp-lossy-rgba", "p3", 6), "webp"),
    "webp-lossless": (("webp-rgba", "none", 1), "webp"),
    "tiff": (("tiff-rgb", "p3", 6), "tif"),
    "tiff-cmyk": (("tiff-cmyk", "none", 1), "tif"),
    "tiff-deep": (("tiff-l12-packed", "none", 1), "tif"),
    "tiff-planes": (("tiff-rgb16-planes", "none", 1), "tif"),
    "gif": (("gif-p-key", "none", 1), "gif"),
    "bmp": (("bmp-rgba", "none", 1), "bmp"),
    "bmp-palette": (("bmp-p", "none", 1), "bmp"),
    "avif": (("avif-rgba", "p3", 6), "avif"),
    "heif": (("heif-rgba", "p3", 6), "heic"),
    "jpeg-2000": (("jp2-rgb", "p3", 1), "jp2"),
    "ppm": (("pgm-16", "none", 1), "pgm"),
    "pbm": (("pbm", "none", 1), "pbm"),
}
VIDEOS: dict[str, tuple[str, dict[str, Any]]] = {
    "mp4": ("mp4", {"codec": "libx264", "options": {"preset": "ultrafast"}, "num_b_frames": 2}),
    "mp4-mpeg4": ("mp4", {"audio": True}),
    "mov-hevc": ("mov", {"codec": "libx265", "container": "mov", "options": {"preset": "ultrafast"}}),
    "mkv": ("mkv", {"codec": "libx264", "container": "matroska", "options": {"preset": "ultrafast"}}),
    "webm": ("webm", {"codec": "libvpx-vp9", "container": "webm", "options": {"cpu-used": "8"}}),
    "avi": ("avi", {"container": "avi"}),
    "ts": ("ts", {"codec": "libx264", "container": "mpegts", "options": {"preset": "ultrafast"}}),
    "mpeg": ("mpg", {"codec": "mpeg2video", "container": "mpeg", "fps": 25}),
    "flv": ("flv", {"codec": "flv", "container": "flv"}),
}


@dataclass(frozen=True)
class Valid:
    """A valid file: its source kind and suffix; `inner` and `seal` open and close what mutations would only break,
    such as compression and checksums."""

    name: str
    kind: str
    suffix: str
    data: bytes
    columns: dict[str, str] = field(default_factory=dict)
    beside: dict[str, bytes] = field(default_factory=dict)
    inner: Bytes | None = None
    seal: Bytes = bytes

    @property
    def is_one_row(self) -> bool:
        return self.kind in ("images", "videos")


def with_checksums(data: bytes) -> bytes:
    """The PNG with right checksums, as far as its chunks can be followed."""
    parts, position = [data[:8]], 8
    while position + 12 <= len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        body = data[position + 8 : position + 8 + length]
        parts.append(struct.pack(">I4s", length, kind) + body + struct.pack(">I", zlib.crc32(kind + body)))
        position += 12 + length
    return b"".join(parts) + data[position:]


def arrow_bytes(columns: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    table = pa.table(columns)
    with pa.ipc.new_stream(buffer, table.schema) as stream:
        stream.write_table(table, max_chunksize=1)
    return buffer.getvalue()


@cache
def files() -> tuple[Valid, ...]:
    """All valid files."""
    found = []
    for name, (case, suffix) in PICTURES.items():
        png = {"inner": bytes, "seal": with_checksums} if suffix == "png" else {}
        found.append(Valid(name, "images", suffix, encoded(case), **png))
    found.append(Valid("png-named", "images", "png", png_of("primaries of P3"), inner=bytes, seal=with_checksums))
    found.append(Valid("avif-named", "images", "avif", avif((12, 13))))
    for name, (suffix, options) in VIDEOS.items():
        found.append(Valid(name, "videos", suffix, encode_video(8, size=(64, 48), gop=4, **options)))
    red, blue = inputs.RED, inputs.BLUE
    many = [red, blue] * 3
    asked = [*inputs.ASKED] * 3
    members = [(f"{i}.{end}", d) for i, image in enumerate(many) for end, d in (("png", image), ("json", b'{"n": 1}'))]
    tar = tar_bytes(members)
    found.append(Valid("tar", "webdataset", "tar", tar))
    clips = [(f"{name}.mp4", data) for name, data in zip("123", (*inputs.clips().values(), *inputs.clips().values()))]
    found.append(Valid("tar-videos", "webdataset", "tar", tar_bytes(clips)))
    packers: dict[str, tuple[Bytes, Bytes]] = {
        "tar.gz": (gzip.decompress, gzip.compress),
        "tar.bz2": (bz2.decompress, bz2.compress),
        "tar.xz": (lzma.decompress, lzma.compress),
        "tar.zst": (lambda data: tar, inputs.zstd),
    }
    found += [
        Valid(suffix, "webdataset", suffix, seal(tar), inner=inner, seal=seal)
        for suffix, (inner, seal) in packers.items()
    ]
    image = {"image": "image"}
    rows = {"image": many, "ask": asked}
    nested = {"image": [[red, blue]] * 4, "ask": [None, "a", "b", "c"], "n": [1.5, 2.0, None, 4.0]}
    found.append(Valid("parquet", "parquet", "parquet", inputs.parquet_bytes(rows), image))
    found.append(Valid("parquet-lists", "parquet", "parquet", inputs.parquet_bytes(nested), image))
    found.append(Valid("arrow", "hf", "arrow", arrow_bytes(rows), image))
    beside = inputs.PICTURES
    uris = {"image": [*inputs.URIS["image"]] * 3, "ask": asked}
    jsonl, csv = inputs.jsonl_bytes(uris), inputs.csv_bytes(uris)
    tsv = csv.replace(b",", b"\t")
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    chats = inputs.jsonl_bytes({"image": ["pictures/red.png"] * 3, "messages": [turns] * 3})
    base64 = [f"data:image/png;base64,{b64encode(data).decode()}" for data in many]
    encoded_images = inputs.jsonl_bytes({"image": [*base64, base64[:2]], "ask": [*asked, "two"]})
    text = "\n".join(asked).encode()
    names = ["pictures/red.png", "pictures/blue.png"] * 3
    talks = [
        {"id": i, "image": name, "conversations": [{"from": "human", "value": f"<image>\n{ask}"}]}
        for i, (name, ask) in enumerate(zip(names, asked, strict=True))
    ]
    array = json.dumps(talks, indent=1).encode()
    images = [{"id": i, "file_name": name} for i, name in enumerate(names)]
    captions = [{"id": i, "image_id": i, "caption": ask} for i, ask in enumerate(asked)]
    coco = json.dumps({"info": {}, "images": images, "annotations": captions}).encode()
    found += [
        Valid("jsonl", "jsonl", "jsonl", jsonl, image, beside),
        Valid("jsonl-data-uris", "jsonl", "jsonl", encoded_images, image),
        Valid("jsonl-chats", "jsonl", "jsonl", chats, {**image, "messages": "messages"}, beside),
        Valid("jsonl.gz", "jsonl", "jsonl.gz", gzip.compress(jsonl), image, beside, gzip.decompress, gzip.compress),
        Valid("jsonl.zst", "jsonl", "jsonl.zst", inputs.zstd(jsonl), image, beside, lambda data: jsonl, inputs.zstd),
        Valid("json", "json", "json", array, {**image, "messages": "conversations"}, beside),
        Valid("json.gz", "json", "json.gz", gzip.compress(array), image, beside, gzip.decompress, gzip.compress),
        Valid("coco", "coco", "json", coco, {}, beside),
        Valid("csv", "csv", "csv", csv, image, beside),
        Valid("csv.gz", "csv", "csv.gz", gzip.compress(csv), image, beside, gzip.decompress, gzip.compress),
        Valid("csv-utf-16", "csv", "csv", b"\xff\xfe" + csv.decode().encode("utf-16-le"), image, beside),
        Valid("tsv", "csv", "tsv", tsv, image, beside),
        Valid("text", "text", "txt", text),
        Valid("text.gz", "text", "txt.gz", gzip.compress(text), inner=gzip.decompress, seal=gzip.compress),
    ]
    return tuple(found)
