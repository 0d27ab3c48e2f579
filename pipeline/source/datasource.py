"""Reading: a Ray Data source over a frozen manifest whose read tasks are spans, and the same reading without Ray.

Every read task returns exactly one table with `rows.read_schema`, rows in manifest order, in any state of its files.
Formats are in `pipeline.sources`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from configs.schema import Source
from pipeline.prompts.templates import whole_text
from pipeline.rows import schemas
from pipeline.rows.schemas import RowError
from pipeline.source import spans
from pipeline.source.done_bitmap import UNKNOWN, DoneSet, Ints
from pipeline.source.manifest import Manifest
from pipeline.source.manifest_parts import counts_of
from pipeline.sources import kind_of
from pipeline.sources.kind import Chunk, Entry, FilePiece, ReadSpec, Sample, byte_of, max_bytes_of
from pipeline.storage import access

if TYPE_CHECKING:
    from ray.data import DataContext

NUM_PIECE_THREADS = 8
MAX_MESSAGE_CHARS = 500


class SpanDatasource(Datasource):  # type: ignore[misc]
    """A source as Ray Data reads it; `fields` are the columns that the prompt names, `limit` the first N samples.

    Without `with_images` no images are read. Samples that are `done` are skipped, and files with no others are not
    opened. `note_count` is called with the file and its samples when a file of unknown count has been read to its end.

    Pass `override_num_blocks=datasource.num_spans` to `ray.data.read_datasource`, so that Ray neither merges nor splits
    the output of read tasks.
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
        """The number of rows of the read tasks, None if some file's count is unknown."""
        known = [self._known_rows(number) for number in range(len(self._spans))]
        return None if None in known else sum(schemas for schemas in known if schemas is not None)

    @property
    def schema(self) -> pa.Schema:
        """The schema of every table."""
        return schemas.read_schema(self._spec.keep)

    def get_name(self) -> str:
        """The operator's name in progress bars."""
        return "ReadSpans"

    def estimate_inmemory_data_size(self) -> int | None:
        """The listed bytes, which is what encoded images take in memory too."""
        return self._manifest.num_bytes

    def read(self, span: int, note: bool = True) -> pa.Table:
        """One span's table in the calling process, without Ray; with `note`, counts are noted as in read tasks."""
        files = list(SpanFiles(self._manifest, self._spans, span, self._done))
        return read_span(self._spec, files, self._note_count if note else None)

    def _known_rows(self, span: int) -> int | None:
        """How many samples of a span are left to read, None when some file's count is unknown."""
        files, starts, stops = self._spans.columns(span)
        counts = self._counts[files]
        if ((stops == spans.TO_THE_END) & (counts == UNKNOWN)).any():
            return None
        num_rows = int((np.where(stops == spans.TO_THE_END, counts, stops) - starts).sum())
        return num_rows if self._done is None else num_rows - self._num_done(files, starts, stops)

    def _num_done(self, files: Ints, starts: Ints, stops: Ints) -> int:
        assert self._done is not None
        known = int(self._done.num_in(files, starts, stops).sum())
        open_ended = np.flatnonzero(self._counts[files] == UNKNOWN)
        return known + sum(
            int(self._done.rows(int(files[place]), int(starts[place]), int(stops[place])).sum()) for place in open_ended
        )

    @cached_property
    def _counts(self) -> Ints:
        return counts_of(self._manifest)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """One task per span, for any `parallelism`: a retry must repeat exactly one span."""
        tasks = []
        for number in range(len(self._spans)):
            pieces = SpanFiles(self._manifest, self._spans, number, self._done)
            metadata = BlockMetadata(
                num_rows=self._known_rows(number),
                size_bytes=pieces.num_bytes,
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
    filesystem, root = access.open_url(spec.root, "source.path")
    return filesystem, replace(spec, root=root)


def read_first(
    source: Source, manifest: Manifest, fields: tuple[str, ...], limit: int, with_images: bool = True
) -> pa.Table:
    """The first `limit` samples in the calling process, without Ray: one table with `rows.read_schema`."""
    spec = ReadSpec(source, manifest.root, fields, manifest.keep, with_images)
    planned = plan_spans(spec, manifest, limit)
    tables = [read_span(spec, list(SpanFiles(manifest, planned, number))) for number in range(len(planned))]
    return pa.concat_tables([schemas.read_schema(spec.keep).empty_table(), *tables])


@dataclass(frozen=True)
class SpanFiles:
    """The pieces of one span. It travels as Arrow columns and arrives as a list of pieces: ten million files as objects
    would not fit the driver."""

    manifest: Manifest
    spans: spans.Spans
    number: int
    done: DoneSet | None = None

    @property
    def listed(self) -> pa.Table:
        """The manifest's rows from the span's first file to its last."""
        files, _, _ = self.spans.columns(self.number)
        return self.manifest.files.slice(int(files[0]), int(files[-1] - files[0]) + 1).select(LISTED_COLUMNS)

    @property
    def num_bytes(self) -> int:
        """The sizes of its files together."""
        return int(pc.sum(self.listed["size_bytes"]).as_py())

    def __iter__(self) -> Iterator[FilePiece]:
        rebuild, arguments = self.__reduce__()
        return iter(rebuild(*arguments))

    def __reduce__(self) -> tuple[Callable[..., list[FilePiece]], tuple[Any, ...]]:
        files, starts, stops = self.spans.columns(self.number)
        special: dict[int, tuple[Entry, bytes]] = {}
        begun = starts > 0 if self.done is None else np.ones(len(files), bool)
        for place in np.flatnonzero(begun).tolist():
            file, start, stop = int(files[place]), int(starts[place]), _end(stops[place])
            left_out = b"" if self.done is None else _left_out(self.done, file, start, stop)
            if start or left_out:
                special[place] = (self.manifest.entry(file, start), left_out)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.listed.schema) as stream:
            stream.write_table(self.listed)
        columns = tuple(column.tobytes() for column in (files, starts, stops))
        return file_pieces, (sink.getvalue().to_pybytes(), *columns, special)


LISTED_COLUMNS = ("path", "num_samples", "size_bytes", "token", "repeated_rows")


def file_pieces(
    listed: bytes, files: bytes, starts: bytes, stops: bytes, special: dict[int, tuple[Entry, bytes]]
) -> list[FilePiece]:
    """The pieces that `SpanFiles` packed: rows of the listing, and by place what only some pieces have."""
    columns = [column.to_pylist() for column in pa.ipc.open_stream(listed).read_all()]
    paths, counts, sizes, tokens, repeated = columns
    ordinals, firsts, ends = (np.frombuffer(column, np.int64).tolist() for column in (files, starts, stops))
    pieces = []
    for place, (file, start, end) in enumerate(zip(ordinals, firsts, ends, strict=True)):
        row, stop = file - ordinals[0], _end(end)
        entry, left_out = special.get(place, (Entry(), b""))
        doubled = frozenset(one for one in repeated[row] if start <= one and (stop is None or one < stop))
        pieces.append(
            FilePiece(paths[row], start, stop, counts[row], entry, sizes[row], tokens[row], doubled, file, left_out)
        )
    return pieces


def _end(stop: int) -> int | None:
    return None if stop == spans.TO_THE_END else int(stop)


def _left_out(done: DoneSet, file: int, start: int, stop: int | None) -> bytes:
    rows_done = done.rows(file, start, stop)
    return np.packbits(rows_done).tobytes() if rows_done.any() else b""


NoteCount = Callable[[int, int, bool], None]


def _read_blocks(spec: ReadSpec, pieces: Iterable[FilePiece], note_count: NoteCount | None) -> Iterator[pa.Table]:
    yield read_span(spec, list(pieces), note_count)


def read_span(spec: ReadSpec, pieces: list[FilePiece], note_count: NoteCount | None = None) -> pa.Table:
    """All samples of a span as one table with `rows.read_schema`; never raises for the contents of files."""
    if len(pieces) > 1:
        with ThreadPoolExecutor(min(NUM_PIECE_THREADS, len(pieces))) as pool:
            parts = list(pool.map(lambda piece: _read_piece(spec, piece, note_count), pieces))
    else:
        parts = [_read_piece(spec, piece, note_count) for piece in pieces]
    tables = [schemas.read_schema(spec.keep).empty_table(), *(table for part in parts for table in part)]
    return _with_unique_ids(pa.concat_tables(tables).combine_chunks())


def _read_piece(spec: ReadSpec, piece: FilePiece, note_count: NoteCount | None) -> list[pa.Table]:
    """The piece's rows without the done ones; if reading fails, an error row for every lost row.

    If their number is unknown, one row represents all rows from there on.
    """
    schema = schemas.read_schema(spec.keep)
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
    except Exception as error:  # decoders of damaged files raise any error; it goes into the row
        known = piece.num_samples if piece.stop is None else piece.stop
        message = f"{piece.path}: cannot be read from row {next_row} on: {access.reason_of(error)}"
        if known is None:
            message += f"; {missing_rows(piece, next_row, byte_of(error))}"
        broken = RowError("broken_shard", message)
        lost = range(next_row, next_row + 1 if known is None else known)
        samples = [Sample(row_index, fields=dict.fromkeys(spec.fields), error=broken) for row_index in lost]
        chunk = Chunk(samples, [pa.nulls(len(samples), field.type) for field in spec.keep])
        tables.append(_table(schema, piece, _without_done(chunk, piece)))
        next_row, is_broken = lost.stop, True
    if note_count is not None and piece.stop is None and piece.num_samples is None:
        note_count(piece.ordinal, next_row, is_broken)
    return tables


def missing_rows(piece: FilePiece, next_row: int, byte: int | None) -> str:
    """The number of missing rows of a file of unknown length that cannot be read from `next_row` on, as far as it is
    known; `byte` is the byte of the file (compressed, if it is) up to which it was read."""
    if byte is not None and byte >= piece.size_bytes:
        return "the file ends there, so at least one row is missing; it does not say how many more"
    if byte and next_row:
        rest = piece.size_bytes - byte
        about = max(1, round(rest * next_row / byte))
        return f"rows missing: about {about:,}, judged by the {rest:,} of {piece.size_bytes:,} bytes not read"
    return "at least one row is missing; how many more is not known"


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
            schemas.ENCODED_IMAGES,
        ),
        pa.array(
            [[asdict(ref) for ref in sample.videos] if error is None else [] for sample, error in zip(samples, errors)],
            schemas.ENCODED_VIDEOS,
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
