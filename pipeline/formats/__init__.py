"""Registers the source kinds; a new one also needs its name in `SourceConfig.kind` of `configs/source.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from configs.load import ConfigError
from files.external_code import ExternalCodeError, is_external, load, place_of
from pipeline.formats import coco, csv, hf, json, jsonl, lance, media_files, parquet, text, webdataset
from pipeline.formats.kind import SourceKind

KINDS: tuple[SourceKind, ...] = (
    parquet.KIND,
    media_files.IMAGES,
    media_files.VIDEOS,
    webdataset.KIND,
    jsonl.KIND,
    json.KIND,
    coco.KIND,
    csv.KIND,
    text.KIND,
    hf.KIND,
    lance.KIND,
)

FAULT = "the code of {} raised "
"""Beginning of the message of a fault of external code."""


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
    return replace(
        kind,
        survey=kind.survey and _refusing(name, kind.survey),
        select=kind.select and _refusing(name, kind.select),
        list_units=kind.list_units and _refusing(name, kind.list_units),
        can_split=_refusing(name, kind.can_split),
        count_early=kind.count_early and _refusing(name, kind.count_early),
        read=partial(_reading, name, kind.read),
        read_ids=kind.read_ids and partial(_reading, name, kind.read_ids),
    )


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of external code whose errors are ConfigError, with the file and the line."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ConfigError:
            raise
        except Exception as error:  # a user's code raises any error
            raise ConfigError(f"source.kind: {_fault(name, error)}") from None

    return call


def _reading(name: str, read: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Any]:
    """Read with external code; errors that only its code can have name the file and the line."""
    try:
        yield from read(*arguments)
    except (AttributeError, NameError, TypeError, ImportError) as error:
        raise RuntimeError(_fault(name, error)) from None


def _fault(name: str, error: Exception) -> str:
    return f"{FAULT.format(name)}{type(error).__name__}: {error}{place_of(error)}"
