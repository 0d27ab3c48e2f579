"""Every input format and every kind of store: small files of each, and the rows expected from them.

Each input holds the same two samples, a red picture and a blue one or two videos, so that the decoded rows
show whether the right bytes reached the right row. `docs/guides/sources.md` shows the table that `markdown` makes.
"""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from tests.pipeline.formats.shards import encode, tar_bytes
from tests.pipeline.media.video.files import encode_video

Files = dict[str, bytes]
RED, BLUE = encode("red"), encode("blue", (4, 2))
ASKED = ("what is red?", "what is blue?")
PICTURES: Files = {"pictures/red.png": RED, "pictures/blue.png": BLUE}


@cache
def clips() -> Files:
    """Two videos whose frames show the numbers 0 to 5 and 100 to 105."""
    return {"clips/a.mp4": encode_video(6), "clips/b.mp4": encode_video(6, first=100)}


def parquet_bytes(columns: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, row_group_size=1)
    return buffer.getvalue()


def csv_bytes(columns: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    pa.csv.write_csv(pa.table(columns), buffer)
    return buffer.getvalue()


def rows_of(columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def jsonl_bytes(columns: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows_of(columns)).encode()


def json_bytes(columns: dict[str, Any]) -> bytes:
    return json.dumps(rows_of(columns)).encode()


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def saved_dataset() -> Files:
    """Return the files that `save_to_disk` of `datasets` writes."""
    import datasets

    datasets.disable_progress_bars()
    features = datasets.Features({"image": datasets.Image(), "ask": datasets.Value("string")})
    cells = [{"bytes": RED, "path": None}, {"bytes": BLUE, "path": None}]
    made = datasets.Dataset.from_dict({"image": cells, "ask": list(ASKED)}, features=features)
    with tempfile.TemporaryDirectory() as folder:
        made.save_to_disk(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def lance_dataset() -> Files:
    """A dataset of Lance's own."""
    import lance

    with tempfile.TemporaryDirectory() as folder:
        lance.write_dataset(pa.table({"image": [RED, BLUE], "ask": list(ASKED)}), f"{folder}/rows.lance")
        files = (path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


TAR = (("1.png", RED), ("1.json", b'{"ask": "what is red?"}'), ("2.png", BLUE), ("2.json", b'{"ask": "what is blue?"}'))
URIS = {"image": list(PICTURES), "ask": list(ASKED)}


@dataclass(frozen=True)
class Input:
    """Files that hold the two samples; `files` are all of them, by path, of which `named` are the source's own."""

    kind: str
    files: Callable[[], Files]
    named: tuple[str, ...]
    columns: dict[str, str] = field(default_factory=dict)
    video: bool = False
    asks: bool = True
    needs: str = ""
    """A library that it takes and that need not be there."""


INPUTS: dict[str, Input] = {
    "Parquet, image bytes": Input(
        "parquet",
        lambda: {"rows.parquet": parquet_bytes({"image": [RED, BLUE], "ask": list(ASKED)})},
        ("rows.parquet",),
        {"image": "image"},
    ),
    "Parquet, image URIs": Input(
        "parquet", lambda: {**PICTURES, "rows.parquet": parquet_bytes(URIS)}, ("rows.parquet",), {"image": "image"}
    ),
    "Parquet, video bytes": Input(
        "parquet",
        lambda: {"rows.parquet": parquet_bytes({"video": list(clips().values()), "ask": list(ASKED)})},
        ("rows.parquet",),
        {"video": "video"},
        video=True,
    ),
    "image files": Input("images", lambda: {"1.png": RED, "2/2.PNG": BLUE}, ("1.png", "2/2.PNG"), asks=False),
    "WebDataset `.tar`": Input("webdataset", lambda: {"s.tar": tar_bytes(list(TAR))}, ("s.tar",)),
    "WebDataset `.tar.gz`": Input(
        "webdataset", lambda: {"s.tar.gz": gzip.compress(tar_bytes(list(TAR)))}, ("s.tar.gz",)
    ),
    "WebDataset `.tar.zst`": Input("webdataset", lambda: {"s.tar.zst": zstd(tar_bytes(list(TAR)))}, ("s.tar.zst",)),
    "WebDataset, videos": Input(
        "webdataset",
        lambda: {"s.tar": tar_bytes([(name.rpartition("/")[2], data) for name, data in clips().items()])},
        ("s.tar",),
        video=True,
        asks=False,
    ),
    "JSONL, image URIs": Input(
        "jsonl", lambda: {**PICTURES, "rows.jsonl": jsonl_bytes(URIS)}, ("rows.jsonl",), {"image": "image"}
    ),
    "JSONL `.gz`": Input(
        "jsonl",
        lambda: {**PICTURES, "r.jsonl.gz": gzip.compress(jsonl_bytes(URIS))},
        ("r.jsonl.gz",),
        {"image": "image"},
    ),
    "JSONL, video URIs": Input(
        "jsonl",
        lambda: {**clips(), "rows.jsonl": jsonl_bytes({"video": list(clips()), "ask": list(ASKED)})},
        ("rows.jsonl",),
        {"video": "video"},
        video=True,
    ),
    "JSON array, image URIs": Input(
        "json", lambda: {**PICTURES, "rows.json": json_bytes(URIS)}, ("rows.json",), {"image": "image"}
    ),
    "JSON array `.zst`": Input(
        "json", lambda: {**PICTURES, "r.json.zst": zstd(json_bytes(URIS))}, ("r.json.zst",), {"image": "image"}
    ),
    "COCO annotations": Input(
        "coco",
        lambda: {**PICTURES, "rows.json": json.dumps({"images": rows_of(URIS)}).encode()},
        ("rows.json",),
        {"image": "image"},
    ),
    "CSV, image URIs": Input(
        "csv", lambda: {**PICTURES, "rows.csv": csv_bytes(URIS)}, ("rows.csv",), {"image": "image"}
    ),
    "CSV `.zst`": Input(
        "csv", lambda: {**PICTURES, "rows.csv.zst": zstd(csv_bytes(URIS))}, ("rows.csv.zst",), {"image": "image"}
    ),
    "text": Input("text", lambda: {"rows.txt": "".join(f"{ask}\n" for ask in ASKED).encode()}, ("rows.txt",)),
    "video files": Input("videos", clips, ("clips/a.mp4", "clips/b.mp4"), video=True, asks=False),
    "`datasets`, saved (Arrow)": Input("hf", saved_dataset, ("data-00000-of-00001.arrow",), {"image": "image"}),
    "`datasets`, Parquet of the hub": Input(
        "hf",
        lambda: {"data/train.parquet": parquet_bytes({"image": [RED, BLUE], "ask": list(ASKED)})},
        ("data/train.parquet",),
        {"image": "image"},
    ),
    "`datasets`, image folder": Input(
        "hf",
        lambda: {
            "red.png": RED,
            "blue.png": BLUE,
            "metadata.csv": csv_bytes({"file_name": ["red.png", "blue.png"], "ask": list(ASKED)}),
        },
        ("metadata.csv",),
        {"image": "file_name"},
    ),
    "Lance": Input("lance", lance_dataset, ("rows.lance",), {"image": "image"}, needs="lance"),
}
STORES = ("local", "s3", "http", "memory")
TITLES = {"local": "local files", "s3": "S3", "http": "HTTP(S)", "memory": "fsspec's `memory`"}
NOT_TO_BE_HAD = {("Lance", "http"), ("Lance", "memory")}
"""Lance reads with its own drivers."""


def markdown() -> str:
    """The table of inputs and stores: what is tested end to end."""
    lines = ["| input | " + " | ".join(TITLES[store] for store in STORES) + " |", "|---" * (1 + len(STORES)) + "|"]
    for name in INPUTS:
        cells = ["–" if (name, store) in NOT_TO_BE_HAD else "✓" for store in STORES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
