"""Converts rows that are mappings (JSON objects, CSV records) to samples: ids, prompt values, kept text, and media as
bytes, a URI, `struct<bytes, path>`, or a list of these."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.formats.base64_text import image_in_text
from pipeline.formats.kind import Chunk, ReadSpec, Sample, VideoRef, resolve_id
from pipeline.formats.nested import lookup
from pipeline.prompts.templates import whole_text
from pipeline.rows.schemas import RowError

Row = Mapping[str, Any] | RowError
CHUNK_ROWS = 256
CHUNK_BYTES = 1024 * 1024
"""Bytes of text after which a chunk ends; parsed JSON may take 30 times its text."""


_PYTHON_LIST = re.compile(r"\['[^'\\]*+'(?:, ?'[^'\\]*+')*+\]")
"""A list of texts as pandas writes it to CSV, of which none has a quote or a backslash."""


def kept_arrays(spec: ReadSpec, rows: Sequence[Mapping[str, Any]]) -> list[pa.Array]:
    """Build one string array per kept column of these rows."""
    return [pa.array([text_of(row.get(name)) for row in rows], pa.string()) for name in spec.keep.names]


def text_of(value: Any) -> str | None:
    """Return a value as text: JSON if it is no string, None for null; RowError like `json_of`."""
    if value is None:
        return None
    return whole_text(value if isinstance(value, str) else json_of(value, ensure_ascii=False))


def json_of(value: Any, ensure_ascii: bool = True) -> str:
    """Return JSON; RowError `invalid_value` for a value that is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    except RecursionError:
        raise RowError("invalid_value", "a value is nested too deeply") from None


def _shown(value: Any) -> str:
    return reprlib.repr(value)[:100]


def chunks_of(spec: ReadSpec, rows: Iterable[tuple[int, Row, int]]) -> Iterator[Chunk]:
    """Group (row index, row, bytes of its text) into chunks; if `rows` raises, the rows before are yielded first."""
    pending: list[tuple[int, Row]] = []
    num_bytes = 0
    try:
        for row_index, row, row_bytes in rows:
            pending.append((row_index, row))
            num_bytes += row_bytes
            if len(pending) == CHUNK_ROWS or num_bytes > CHUNK_BYTES:
                yield _chunk_of(spec, pending)
                pending, num_bytes = [], 0
    except Exception:
        yield _chunk_of(spec, pending)
        raise
    yield _chunk_of(spec, pending)


def _chunk_of(spec: ReadSpec, rows: list[tuple[int, Row]]) -> Chunk:
    samples, kept_texts = [], []
    values = [{} if isinstance(row, RowError) else row for _, row in rows]
    for (row_index, row), mapping in zip(rows, values, strict=True):
        sample, texts = Sample(row_index, fields=dict.fromkeys(spec.fields)), dict[str, str | None]()
        try:
            if isinstance(row, RowError):
                raise row
            texts = {name: text_of(lookup(mapping, name)) for name in spec.keep.names}
            sample.fields = json_of({name: lookup(mapping, name) for name in spec.fields})
            if (column := spec.source.id_column) is not None:
                sample.id_value = whole_text(resolve_id(lookup(mapping, column), column, spec.source))
        except RowError as error:
            sample.error = error
        samples.append(sample)
        kept_texts.append(texts)
    add_media(spec, samples, lambda column, offset: lookup(values[offset], column))
    return Chunk(samples, kept_arrays(spec, kept_texts))


def add_media(spec: ReadSpec, samples: Sequence[Sample], cell_of: Callable[[str, int], Any]) -> None:
    """Set images and videos of every sample without an error from `cell_of(column, index)`; missing or invalid media
    become the sample's error: `missing_*`, `*_too_large` or `invalid_value`. `source.text_only_rows` allows rows
    without media."""
    source = spec.source
    for offset, sample in enumerate(samples):
        try:
            if sample.error is None and (column := source.columns.image) is not None:
                sample.images = _check_cell(spec, cell_of(column, offset), column, "image", source.max_image_bytes)
            if sample.error is None and (column := source.columns.video) is not None:
                videos = _check_cell(spec, cell_of(column, offset), column, "video", source.video.max_video_bytes)
                sample.videos = [VideoRef(uri=ref) if isinstance(ref, str) else VideoRef(bytes=ref) for ref in videos]
        except RowError as error:
            sample.error = error


def _check_cell(spec: ReadSpec, cell: Any, column: str, kind: str, max_bytes: int) -> list[bytes | str]:
    cell = _parsed(cell)
    if (cell is None or cell == "" or cell == []) and spec.may_lack(cell):
        return []
    if cell == []:
        raise RowError(f"missing_{kind}", f"the column {column!r} names no {kind} in this row")
    if isinstance(cell, list) and all(type(part) is int for part in cell):
        cell = _bytes_of(cell, column)
    return [_check_part(part, column, kind, max_bytes) for part in (cell if isinstance(cell, list) else [cell])]


def _parsed(cell: Any) -> Any:
    """Return the list or object of a cell that is its JSON text, or the list of texts that Python shows so; None for an
    object without bytes and path, and other cells unchanged."""
    if isinstance(cell, str) and cell[:1] + cell[-1:] in ("[]", "{}"):
        if _PYTHON_LIST.fullmatch(cell):
            return re.findall(r"'([^']*)'", cell)
        with suppress(ValueError, RecursionError):
            cell = json.loads(cell)
    return None if isinstance(cell, dict) and not (cell.get("bytes") or cell.get("path")) else cell


def _bytes_of(numbers: Sequence[int], column: str) -> bytes:
    """Return a list of bytes (0 to 255, or −128 to 127 as of Java) as bytes; RowError for other numbers."""
    try:
        return bytes(numbers) if min(numbers) >= 0 else np.array(numbers, np.int8).tobytes()
    except (ValueError, OverflowError):
        raise RowError("invalid_value", f"the column {column!r} holds a list of numbers that are no bytes") from None


def _check_part(part: Any, column: str, kind: str, max_bytes: int) -> bytes | str:
    if isinstance(part, dict):
        part = part.get("bytes") or part.get("path")
    if isinstance(part, list) and part and all(type(number) is int for number in part):
        part = _bytes_of(part, column)
    if isinstance(part, str) and kind == "image":
        part = image_in_text(part) or part
    if isinstance(part, bytes) and part:
        if len(part) > max_bytes:
            raise RowError(f"{kind}_too_large", f"an encoded {kind} has {len(part)} bytes, more than {max_bytes}")
        return part
    if not part and (part is None or isinstance(part, bytes | str)):
        raise RowError(f"missing_{kind}", f"the column {column!r} has no {kind} in this row")
    if isinstance(part, str):
        return whole_text(part)
    raise RowError("invalid_value", f"the column {column!r} holds {_shown(part)}, which is neither bytes nor a URI")
