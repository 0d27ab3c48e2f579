"""Reading: a Ray Data source over a frozen manifest whose read tasks are spans, and the same reading without Ray.

Every read task gives exactly one table with `rows.read_schema`, rows in manifest order, whatever state its files are
in. Knows spans, kinds and rows; formats are in `pipeline.sources`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from configs.schema import Source
from pipeline import rows, spans, storage
from pipeline.doneset import DoneSet
from pipeline.manifest import Manifest
from pipeline.prompts import whole_text
from pipeline.rows import RowError
from pipeline.sources import kind_of
from pipeline.sources.kind import Chunk, FilePiece, ReadSpec, Sample, max_bytes_of

if TYPE_CHECKING:
    from ray.data import DataContext

NUM_PIECE_THREADS = 8
MAX_MESSAGE_CHARS = 500


class SpanDatasource(Datasource):  # type: ignore[misc]
    """A source as Ray Data reads it; `fields` are the columns that the prompt names, `limit` the first N samples.

    Where samples are not made of images (`with_images`), none are read. Samples that are `done` are left out, and files
    that hold no others are not opened. `note_count` is told the file and its samples when a file whose count was not
    known has been read to its end.

    Pass `override_num_blocks=datasource.num_spans` to `ray.data.read_datasource`, so that Ray neither merges nor splits
    what the read tasks give.
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        fields: tuple[str, ...] = (),
        limit: int | None = None,
        with_images: bool = True,
        done: DoneSet | None = None,
        note_count: Callable[[int, int, bool], None] | None = None,
    ) -> None:
        super().__init__()
        self._spec = ReadSpec(source, manifest.root, fields, manifest.keep, with_images)
        self._manifest = manifest
        self._done = done
        self._note_count = note_count
        self.planned = plan_spans(self._spec, manifest, limit)
        self._spans = self.planned if done is None else spans.remaining(self.planned, done)

    @property
    def num_spans(self) -> int:
        """How many read tasks there are."""
        return len(self._spans)

    @property
    def num_samples(self) -> int | None:
        """How many rows the read tasks give, None when some file's count is unknown."""
        total = 0
        for span in self._spans:
            known = _known_rows(self._pieces(span))
            if known is None:
                return None
            total += known
        return total

    @property
    def schema(self) -> pa.Schema:
        """The schema of every table."""
        return rows.read_schema(self._spec.keep)

    def get_name(self) -> str:
        """The operator's name in progress bars."""
        return "ReadSpans"

    def estimate_inmemory_data_size(self) -> int | None:
        """The listed bytes, which is what encoded images take in memory too."""
        return self._manifest.num_bytes

    def read(self, span: int) -> pa.Table:
        """One span's table in the calling process, without Ray."""
        return read_span(self._spec, self._pieces(self._spans[span]), self._note_count)

    def _pieces(self, span: spans.Span) -> list[FilePiece]:
        return _file_pieces(self._manifest, span, self._done)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """One task per span, whatever parallelism is asked for: a span is what a retry must repeat exactly."""
        tasks = []
        for span in self._spans:
            pieces = self._pieces(span)
            metadata = BlockMetadata(
                num_rows=_known_rows(pieces),
                size_bytes=sum(_listed(self._manifest, span)["size_bytes"].to_pylist()),
                exec_stats=None,
                input_files=None,
            )
            read = partial(_read_blocks, self._spec, pieces, self._note_count)
            read.__name__ = "read_span"  # type: ignore[attr-defined]  # Ray names tasks by it
            tasks.append(ReadTask(read, metadata, schema=self.schema, per_task_row_limit=per_task_row_limit))
        return tasks


def plan_spans(spec: ReadSpec, manifest: Manifest, limit: int | None) -> spans.Spans:
    """The manifest's spans; with a limit, those of the first samples, counting in files whose count is unknown."""
    planned = spans.plan(manifest.files, spec.source.span_max_rows, spec.source.span_max_bytes)
    if limit is None:
        return planned
    filesystem, spec = _opened(spec)
    counts, paths = manifest.files["num_samples"], manifest.files["path"]

    def num_samples(file: int, at_most: int) -> int:
        known = counts[file].as_py()
        if known is not None:
            return int(known)
        return kind_of(spec.source.kind).count(filesystem, spec, paths[file].as_py(), at_most)

    return spans.take(planned, limit, num_samples)


def _opened(spec: ReadSpec) -> tuple[Any, ReadSpec]:
    """The source's file system, and the spec with the root as a path in it."""
    filesystem, root = storage.open_url(spec.root, "source.path")
    return filesystem, replace(spec, root=root)


def read_first(
    source: Source, manifest: Manifest, fields: tuple[str, ...], limit: int, with_images: bool = True
) -> pa.Table:
    """The first `limit` samples in the calling process, without Ray: one table with `rows.read_schema`."""
    spec = ReadSpec(source, manifest.root, fields, manifest.keep, with_images)
    tables = [read_span(spec, _file_pieces(manifest, span)) for span in plan_spans(spec, manifest, limit)]
    return pa.concat_tables([rows.read_schema(spec.keep).empty_table(), *tables])


def _file_pieces(manifest: Manifest, span: spans.Span, done: DoneSet | None = None) -> list[FilePiece]:
    listed = _listed(manifest, span)
    columns = (listed[name].to_pylist() for name in ("path", "num_samples", "size_bytes", "token", "repeated_rows"))
    paths, counts, sizes, tokens, repeated = columns
    first = span[0].file
    return [
        FilePiece(
            paths[file - first],
            start,
            stop,
            counts[file - first],
            manifest.entry(file, start),
            sizes[file - first],
            tokens[file - first],
            frozenset(row for row in repeated[file - first] if start <= row and (stop is None or row < stop)),
            file,
            b"" if done is None else _left_out(done, file, start, stop),
        )
        for file, start, stop in span
    ]


def _left_out(done: DoneSet, file: int, start: int, stop: int | None) -> bytes:
    rows_done = done.rows(file, start, stop)
    return np.packbits(rows_done).tobytes() if rows_done.any() else b""


def _listed(manifest: Manifest, span: spans.Span) -> pa.Table:
    """The manifest's rows from the span's first file to its last."""
    return manifest.files.slice(span[0].file, span[-1].file - span[0].file + 1)


def _known_rows(pieces: list[FilePiece]) -> int | None:
    total = 0
    for piece in pieces:
        stop = piece.num_samples if piece.stop is None else piece.stop
        if stop is None:
            return None
        total += stop - piece.start - piece.num_left_out
    return total


NoteCount = Callable[[int, int, bool], None]


def _read_blocks(spec: ReadSpec, pieces: list[FilePiece], note_count: NoteCount | None) -> Iterator[pa.Table]:
    yield read_span(spec, pieces, note_count)


def read_span(spec: ReadSpec, pieces: list[FilePiece], note_count: NoteCount | None = None) -> pa.Table:
    """All samples of a span as one table with `rows.read_schema`; never raises for what is in the files."""
    if len(pieces) > 1:
        with ThreadPoolExecutor(min(NUM_PIECE_THREADS, len(pieces))) as pool:
            parts = list(pool.map(lambda piece: _read_piece(spec, piece, note_count), pieces))
    else:
        parts = [_read_piece(spec, piece, note_count) for piece in pieces]
    tables = [rows.read_schema(spec.keep).empty_table(), *(table for part in parts for table in part)]
    return _with_unique_ids(pa.concat_tables(tables).combine_chunks())


def _read_piece(spec: ReadSpec, piece: FilePiece, note_count: NoteCount | None) -> list[pa.Table]:
    """The piece's rows without those that are done; where reading fails, an error row for every row that is lost.

    Where nobody knows how many those are, one row stands for everything from there on.
    """
    schema = rows.read_schema(spec.keep)
    tables: list[pa.Table] = []
    next_row = piece.start
    num_bytes, max_bytes = 0, max_bytes_of(spec, piece)
    is_broken = False
    try:
        filesystem, opened = _opened(spec)
        for chunk in kind_of(spec.source.kind).read(filesystem, opened, piece):
            table = _table(schema, piece, _without_done(chunk, piece))
            num_bytes += table.nbytes
            if num_bytes > max_bytes:
                raise ValueError(f"what has been read of it takes more than {max_bytes} bytes")
            tables.append(table)
            next_row = chunk.samples[-1].row_index + 1 if chunk.samples else next_row
    except Exception as error:  # decoders of damaged files raise what they like; the row says what it was
        known = piece.num_samples if piece.stop is None else piece.stop
        message = f"{piece.path}: cannot be read from row {next_row} on: {storage.reason_of(error)}"
        broken = RowError("broken_shard", message)
        lost = range(next_row, next_row + 1 if known is None else known)
        samples = [Sample(row_index, fields=dict.fromkeys(spec.fields), error=broken) for row_index in lost]
        chunk = Chunk(samples, [pa.nulls(len(samples), field.type) for field in spec.keep])
        tables.append(_table(schema, piece, _without_done(chunk, piece)))
        next_row, is_broken = lost.stop, True
    if note_count is not None and piece.stop is None and piece.num_samples is None:
        note_count(piece.ordinal, next_row, is_broken)
    return tables


def _without_done(chunk: Chunk, piece: FilePiece) -> Chunk:
    if not piece.left_out:
        return chunk
    places = [place for place, sample in enumerate(chunk.samples) if not piece.leaves_out(sample.row_index)]
    taken = pa.array(places, pa.int64())
    return Chunk([chunk.samples[place] for place in places], [column.take(taken) for column in chunk.keep])


def _table(schema: pa.Schema, piece: FilePiece, chunk: Chunk) -> pa.Table:
    """One chunk as a table."""
    samples = chunk.samples
    for sample in samples:
        if sample.row_index in piece.repeated and sample.own_id is not None:
            sample.error = sample.error or RowError("duplicate_id", f"the id {sample.own_id[:100]!r} is there twice")
            sample.own_id = None
    errors = [sample.error for sample in samples]
    columns: list[Any] = [
        pa.array([sample.own_id or path_id(piece.path, sample.row_index) for sample in samples], pa.string()),
        pa.array([piece.path] * len(samples), pa.string()),
        pa.array([sample.row_index for sample in samples], pa.int64()),
        pa.array(
            [_cell(sample) if error is None else [] for sample, error in zip(samples, errors, strict=True)],
            rows.ENCODED_IMAGES,
        ),
        pa.array(
            [[asdict(ref) for ref in sample.videos] if error is None else [] for sample, error in zip(samples, errors)],
            rows.ENCODED_VIDEOS,
        ),
        pa.array([json.dumps(sample.fields) for sample in samples], pa.string()),
        pa.array(["" if error is None else error.code for error in errors], pa.string()),
        pa.array(["" if error is None else _message(error) for error in errors], pa.string()),
        *chunk.keep,
    ]
    return pa.table(columns, schema=schema)


def path_id(path: str, row_index: int) -> str:
    """The id of a sample that has none of its own."""
    return f"{path}#{row_index}"


def _with_unique_ids(table: pa.Table) -> pa.Table:
    """The table; a row whose id an earlier row has is named by its path and is an error."""
    ids = table["sample_id"].to_pylist()
    if len(set(ids)) == len(ids):
        return table
    codes, messages, cells = (table[name].to_pylist() for name in ("error_type", "error_message", "images"))
    paths, row_indices = table["source"].to_pylist(), table["row_index"].to_pylist()
    seen: set[str] = set()
    for index, own_id in enumerate(ids):
        if own_id in seen:
            ids[index] = path_id(paths[index], row_indices[index])
            while ids[index] in seen:  # an id of the user's own that looks like one of ours
                ids[index] += "#"
            if not codes[index]:
                error = RowError("duplicate_id", f"the id {own_id[:100]!r} is there twice")
                codes[index], messages[index], cells[index] = error.code, _message(error), []
        seen.add(ids[index])
    for name, values in (("sample_id", ids), ("error_type", codes), ("error_message", messages), ("images", cells)):
        place = table.schema.get_field_index(name)
        field = table.schema.field(place)
        table = table.set_column(place, field, pa.array(values, field.type))
    return table


def _cell(sample: Sample) -> list[dict[str, bytes | str]]:
    return [{"uri": image} if isinstance(image, str) else {"bytes": image} for image in sample.images]


def _message(error: RowError) -> str:
    message = whole_text(error.message)
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 3] + "..."
