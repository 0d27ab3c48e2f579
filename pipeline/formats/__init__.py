"""Registers the source kinds; a new one also needs its name in `SourceConfig.kind` of `configs/source.py`."""

from __future__ import annotations

from configs.load import ConfigError
from files.external_code import ExternalCodeError, is_external, load
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
    """Return a built-in source kind, or the one that `module:name` names; ConfigError if that is none."""
    if not is_external(name):
        return next(kind for kind in KINDS if kind.name == name)
    try:
        kind = load(name)
    except ExternalCodeError as error:
        raise ConfigError(f"source.kind: {name}: {error}") from None
    if not isinstance(kind, SourceKind):
        wanted = "a draftfleet.pipeline.formats.kind.SourceKind"
        raise ConfigError(f"source.kind: {name} is {type(kind).__name__}, and it must be {wanted}")
    return kind
