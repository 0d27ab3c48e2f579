"""Reads Arrow IPC files in the streaming or file format; local files are memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa

from pipeline.sources.kind import Chunk, FilePiece, Index, Kind, Needs, ReadSpec, Survey, survey_of
from pipeline.sources.tables import DistinctSchemas, chunk_of, needed_columns
from pipeline.storage import access

FILE_MAGIC = b"ARROW1"
BATCH_ROWS = 128


@contextmanager
def open_batches(filesystem: Any, path: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Open a file as its schema and an iterator over its record batches, which are not validated."""
    with ExitStack() as stack:
        if access.is_local(filesystem):
            source: Any = stack.enter_context(pa.memory_map(path, "r"))
        else:
            source = stack.enter_context(pa.PythonFile(stack.enter_context(access.open_file(filesystem, path)), "r"))
        if source.read(len(FILE_MAGIC)) == FILE_MAGIC:
            file = stack.enter_context(pa.ipc.open_file(source))
            yield file.schema, (file.get_batch(index) for index in range(file.num_record_batches))
        else:
            source.seek(0)
            reader = stack.enter_context(pa.ipc.open_stream(source))
            yield reader.schema, iter(reader)


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """Read the schema of every file and count the rows of local files."""
    schemas = DistinctSchemas()
    indices: list[Index | None] = []
    for path in files["path"].to_pylist():
        index = Index()
        try:
            with open_batches(filesystem, access.join(root, path)) as (schema, batches):
                for batch in batches if access.is_local(filesystem) else ():
                    if batch.num_rows:
                        index.add(batch.num_rows, batch.nbytes, 0)
        except Exception:  # the read task reports the error
            indices.append(None)
            continue
        schemas.add(schema, path)
        indices.append(index if access.is_local(filesystem) else None)
    return survey_of(indices, schemas.found)


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    names = needed_columns(spec)
    position = 0
    with open_batches(filesystem, access.join(spec.root, piece.path)) as (schema, batches):
        present = [name for name in names if name in schema.names]
        for batch in batches:
            end = position + batch.num_rows
            low, high = max(piece.start, position), end if piece.stop is None else min(piece.stop, end)
            if low < high:
                check_batch(batch)
            for first in range(low, high, BATCH_ROWS):
                part = batch.select(present).slice(first - position, min(BATCH_ROWS, high - first))
                yield chunk_of(spec, piece.path, part, first)
            position = end
            if piece.stop is not None and position >= piece.stop:
                return
    piece.check_end(position)


def check_batch(batch: pa.RecordBatch) -> None:
    """Raise ArrowInvalid for a batch whose offsets are outside its buffers, because reading it is unsafe; invalid UTF-8
    is accepted here and becomes a row error."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


KIND = Kind("arrow", (".arrow",), survey, read)
"""Not in `KINDS`; used by the source kind `hf`."""
