"""Looks up values inside objects: `body.messages` is the key `messages` of the column `body`. A column of that whole
name takes precedence."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

MAX_DEPTH = 16
"""Maximum number of objects around a value that is looked up."""


def lookup(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a name, or None; objects may be JSON text."""
    return _find(row, name, MAX_DEPTH)[1]


def found_in(row: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Return the names that a row has a value for, null included, besides all its own keys."""
    return set(row) | {name for name in names if _find(row, name, MAX_DEPTH)[0]}


def _find(row: Mapping[str, Any], name: str, depth: int) -> tuple[bool, Any]:
    """Return whether the row has the name, and its value."""
    if name in row:
        return True, row[name]
    dot = name.find(".")
    while dot >= 0 and depth:
        inner = row.get(name[:dot])
        if isinstance(inner, str) and inner.lstrip()[:1] == "{":
            with suppress(ValueError, RecursionError):
                inner = json.loads(inner)
        if isinstance(inner, Mapping):
            has_value, value = _find(inner, name[dot + 1 :], depth - 1)
            if has_value:
                return True, value
        dot = name.find(".", dot + 1)
    return False, None


def holders(names: Iterable[str], available: Collection[str]) -> list[str]:
    """Return the columns of a file that hold the values of these names: the columns themselves, or those around them;
    names that are in none are left out."""
    holding: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        options = (".".join(parts[:length]) for length in (len(parts), *range(1, len(parts))))
        holding |= dict.fromkeys(option for option in options if option in available)
    return list(holding)


def with_nested(schema: pa.Schema, names: Iterable[str]) -> pa.Schema:
    """Return the schema with a field of each name that is inside a struct of it."""
    for name in names:
        if name not in schema.names and (path := _path(schema, name)) is not None:
            kind = schema.field(path[0]).type
            for step in path[1:]:
                kind = kind.field(step).type
            schema = schema.append(pa.field(name, kind))
    return schema


def expanded(batch: pa.RecordBatch, names: Iterable[str]) -> pa.RecordBatch:
    """Return the batch with a column of each name that is inside a struct of it."""
    for name in names:
        if name not in batch.schema.names and (path := _path(batch.schema, name)) is not None:
            batch = batch.append_column(name, pc.struct_field(batch.column(path[0]), path[1:]))
    return batch


def _path(schema: pa.Schema, name: str) -> list[str] | None:
    """Return the names of the column and the fields to a value inside a struct; None if there is none."""
    parts = name.split(".")
    for length in range(1, min(len(parts), MAX_DEPTH)):
        column, rest = ".".join(parts[:length]), parts[length:]
        if schema.get_field_index(column) < 0:
            continue
        kind = schema.field(column).type
        for step in rest:
            index = kind.get_field_index(step) if pt.is_struct(kind) else -1
            if index < 0:
                break
            kind = kind.field(index).type
        else:
            return [column, *rest]
    return None
