"""Registers the source kinds; a new one also needs its name in `SourceConfig.kind` of `configs/source.py`."""

from __future__ import annotations

from pipeline.formats import csv, hf, jsonl, lance, media_files, parquet, text, webdataset
from pipeline.formats.kind import SourceKind

KINDS: tuple[SourceKind, ...] = (
    parquet.KIND,
    media_files.IMAGES,
    media_files.VIDEOS,
    webdataset.KIND,
    jsonl.KIND,
    csv.KIND,
    text.KIND,
    hf.KIND,
    lance.KIND,
)


def kind_of(name: str) -> SourceKind:
    return next(kind for kind in KINDS if kind.name == name)
