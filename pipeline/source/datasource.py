"""Reads a frozen manifest as a Ray Data source with one read task per span, or in the calling process without Ray.

Every read task returns exactly one table with `rows.read_schema` and its rows in manifest order, even if files are
damaged or missing. Formats are in `pipeline.sources`.
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

from configs.source import Source
from pipeline.prompts.templates import whole_text
from pipeline.rows import schemas
from pipeline.rows.schemas import RowError
from pipeline.source import spans
from pipeline.source.done_bitmap import UNKNOWN, DoneBitmap, Ints
from pipeline.source.manifest import Manifest
from pipeline.source.shards import spans_of
from pipeline.sources import kind_of
from pipeline.sources.kind import Chunk, Entry, FilePiece, ReadSpec, Sample, byte_of, max_bytes_of
from pipeline.storage import access

if TYPE_CHECKING:
    from ray.data import DataContext

NUM_PIECE_THREADS = 8
MAX_MESSAGE_CHARS = 500
NoteCount = Callable[[int, int, bool], None]


class SpanDatasource(Datasource):  # type: ignore[misc]
    """Ray Data source of a manifest; `fields` are the columns that the prompt names, `limit` reads the first N samples.

    Without `with_images` no images are read. Samples that are `done` are skipped, and files whose samples are all done
    are not opened. When a file of unknown count has been read, `note_count` receives the file's ordinal, its number of
    samples, and whether the file is broken. If the manifest is cut into shards, only samples of `shard` are read.

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
        done: DoneBitmap | None = None,
        note_count: NoteCount | None = None,
        shard: int = 0,
    ) -> None:
        super().__init__()
        self._spec = ReadSpec(source, manifest.root, fields, manifest.keep, with_images)
        self._manifest = manifest
        self._done = done
        self._note_count = note_count
        self.planned = plan_spans(self._spec, manifest, limit, shard)
        self._spans = self.planned if done is None else spans.remaining(self.planned, done)

    @property
    def num_spans(self) -> int:
        return len(self._spans)

    @property
    def num_samples(self) -> int | None:
        """Total number of rows of all read tasks; None if some file's count is unknown."""
        known = [self._known_rows(number) for number in range(len(self._spans))]
        return None if None in known else sum(count for count in known if count is not None)

    @property
    def schema(self) -> pa.Schema:
        return schemas.read_schema(self._spec.keep)

    def get_name(self) -> str:
        return "ReadSpans"

    def estimate_inmemory_data_size(self) -> int | None:
        """Return the listed file sizes in bytes; encoded images take the same amount of memory."""
        return self._manifest.num_bytes

    def read(self, span: int, note: bool = True) -> pa.Table:
        """Read one span in the calling process, without Ray; with `note`, `note_count` is called as in read tasks."""
        return read_span(self._spec, list(self._pieces(span)), self._note_count if note else None)

    def _pieces(self, span: int) -> SpanFiles:
        return SpanFiles(self._manifest, self._spans, span, self._done)

    def _known_rows(self, span: int) -> int | None:
        """Return how many samples of a span are left to read; None if some file's count is unknown."""
        files, starts, stops = self._spans.columns(span)
        counts = self._counts[files]
        if ((stops == spans.TO_THE_END) & (counts == UNKNOWN)).any():
            return None
        num_rows = int((np.where(stops == spans.TO_THE_END, counts, stops) - starts).sum())
        if self._done is None:
            return num_rows
        num_rows -= int(self._done.num_in(files, starts, stops).sum())
        for place in np.flatnonzero(counts == UNKNOWN):
            num_rows -= int(self._done.rows(int(files[place]), int(starts[place]), int(stops[place])).sum())
        return num_rows

    @cached_property
    def _counts(self) -> Ints:
        return self._manifest.counts

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """Return one task per span, whatever `parallelism` is: a retry must repeat exactly one span."""
        tasks = []
        for number in range(len(self._spans)):
            pieces = self._pieces(number)
            metadata = BlockMetadata(
                num_rows=self._known_rows(number), size_bytes=pieces.num_bytes, exec_stats=None, input_files=None
            )
            read = partial(_read_blocks, self._spec, pieces, self._note_count)
            read.__name__ = "read_span"  # type: ignore[attr-defined]  # Ray names tasks by it
            tasks.append(ReadTask(read, metadata, schema=self.schema, per_task_row_limit=per_task_row_limit))
        return tasks


def plan_spans(spec: ReadSpec, manifest: Manifest, limit: int | None, shard: int) -> spans.Spans:
    """Plan the spans of a shard; with a limit, only its first samples. Counts samples in files of unknown count."""
    planned = spans.plan(manifest.files, spec.source.span_max_rows, spec.source.span_max_bytes)
    planned = spans_of(planned, manifest.cuts, shard)
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
    """Return the source's file system, and the spec with its root as a path in that file system."""
    filesystem, root = access.open_url(spec.root, "source.path")
    return filesystem, replace(spec, root=root)


def read_first(
    source: Source, manifest: Manifest, fields: tuple[str, ...], limit: int, with_images: bool = True, shard: int = 0
) -> pa.Table:
    """Read the first `limit` samples of a shard in the calling process, without Ray: one table with
    `rows.read_schema`."""
    datasource = SpanDatasource(source, manifest, fields, limit, with_images, shard=shard)
    tables = [datasource.read(number) for number in range(datasource.num_spans)]
    return pa.concat_tables([datasource.schema.empty_table(), *tables])


@dataclass(frozen=True)
class SpanFiles:
    """The pieces of one span. It is pickled as Arrow columns and unpickled as a list of pieces, because one Python
    object per piece would not fit in the driver's memory for ten million files."""

    manifest: Manifest
    spans: spans.Spans
    number: int
    done: DoneBitmap | None = None

    @property
    def num_bytes(self) -> int:
        files, _, _ = self.spans.columns(self.number)
        sizes = self.manifest.files["size_bytes"].slice(int(files[0]), int(files[-1] - files[0]) + 1)
        return int(pc.sum(sizes).as_py())

    def __iter__(self) -> Iterator[FilePiece]:
        rebuild, arguments = self.__reduce__()
        return iter(rebuild(*arguments))

    def __reduce__(self) -> tuple[Callable[..., list[FilePiece]], tuple[Any, ...]]:
        files, starts, stops = self.spans.columns(self.number)
        extras: dict[int, tuple[Entry, bytes]] = {}
        is_partial = starts > 0 if self.done is None else np.ones(len(files), bool)
        for index in np.flatnonzero(is_partial).tolist():
            file, start = int(files[index]), int(starts[index])
            done_bits = b""
            if self.done is not None:
                rows_done = self.done.rows(file, start, spans.end_of(stops[index]))
                done_bits = np.packbits(rows_done).tobytes() if rows_done.any() else b""
            if start or done_bits:
                extras[index] = (self.manifest.entry(file, start) if start else Entry(), done_bits)
        first = int(files[0])
        listed = self.manifest.files.slice(first, int(files[-1]) - first + 1).take(pa.array(files - first))
        columns = [listed[name].combine_chunks() for name in LISTED_COLUMNS]
        return file_pieces, (columns, files, starts, stops, extras)


LISTED_COLUMNS = ("path", "num_samples", "size_bytes", "token", "repeated_rows")


def file_pieces(
    listed: list[pa.Array], files: Ints, starts: Ints, stops: Ints, extras: dict[int, tuple[Entry, bytes]]
) -> list[FilePiece]:
    """Unpack the pieces of `SpanFiles` from columns of the listing; `extras` is (entry, done bits) by piece index."""
    pieces = []
    columns = (*(column.to_pylist() for column in listed), files.tolist(), starts.tolist(), stops.tolist())
    for index, values in enumerate(zip(*columns, strict=True)):
        path, count, size, token, repeated, file, start, end = values
        stop = spans.end_of(end)
        entry, done_bits = extras.get(index, (Entry(), b""))
        repeated_rows = frozenset(row for row in repeated if start <= row and (stop is None or row < stop))
        pieces.append(FilePiece(path, start, stop, count, entry, size, token, repeated_rows, file, done_bits))
    return pieces


def _read_blocks(spec: ReadSpec, pieces: Iterable[FilePiece], note_count: NoteCount | None) -> Iterator[pa.Table]:
    yield read_span(spec, list(pieces), note_count)


def read_span(spec: ReadSpec, pieces: list[FilePiece], note_count: NoteCount | None = None) -> pa.Table:
    """Read all samples of a span as one table with `rows.read_schema`; errors in files become error rows."""
    with ThreadPoolExecutor(NUM_PIECE_THREADS) as pool:  # starts at most one thread per piece
        parts = list(pool.map(lambda piece: _read_piece(spec, piece, note_count), pieces))
    tables = [schemas.read_schema(spec.keep).empty_table(), *(table for part in parts for table in part)]
    return _with_unique_ids(pa.concat_tables(tables).combine_chunks())


def _read_piece(spec: ReadSpec, piece: FilePiece, note_count: NoteCount | None) -> list[pa.Table]:
    """Read the rows of a piece that are not done; if reading fails, return an error row for every lost row.

    If the number of lost rows is unknown, one error row represents all of them.
    """
    tables: list[pa.Table] = []
    next_row = piece.start
    num_bytes, max_bytes = 0, max_bytes_of(spec, piece)
    is_broken = False
    try:
        filesystem, opened = _opened(spec)
        for chunk in kind_of(spec.source.kind).read(filesystem, opened, piece):
            table = _table(spec, piece, chunk)
            num_bytes += table.nbytes
            if num_bytes > max_bytes:
                raise ValueError(f"the data read so far takes more than {max_bytes} bytes")
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
        tables.append(_table(spec, piece, Chunk(samples, [pa.nulls(len(samples), field.type) for field in spec.keep])))
        next_row, is_broken = lost.stop, True
    if note_count is not None and piece.stop is None and piece.num_samples is None:
        note_count(piece.ordinal, next_row, is_broken)
    return tables


def missing_rows(piece: FilePiece, next_row: int, byte: int | None) -> str:
    """Describe how many rows are lost in a file of unknown count that cannot be read from `next_row` on.

    `byte` is the position, in the possibly compressed file, up to which it was read.
    """
    if byte is not None and byte >= piece.size_bytes:
        return "the file ends there, so at least one row is missing; it does not say how many more"
    if byte and next_row:
        rest = piece.size_bytes - byte
        about = max(1, round(rest * next_row / byte))
        return f"rows missing: about {about:,}, judged by the {rest:,} of {piece.size_bytes:,} bytes not read"
    return "at least one row is missing; how many more is not known"


def _table(spec: ReadSpec, piece: FilePiece, chunk: Chunk) -> pa.Table:
    """Convert the rows of one chunk that are not done to a table with `rows.read_schema`."""
    indices = [index for index, sample in enumerate(chunk.samples) if not piece.is_done(sample.row_index)]
    samples, keep = [chunk.samples[index] for index in indices], chunk.keep
    if len(samples) < len(chunk.samples):
        keep = [column.take(pa.array(indices, pa.int64())) for column in keep]
    for sample in samples:
        if sample.row_index in piece.repeated and sample.id_value is not None:
            sample.error = sample.error or _repeated_id(sample.id_value)
            sample.id_value = None
    values = [
        [sample.id_value or path_id(piece.path, sample.row_index) for sample in samples],
        [piece.path] * len(samples),
        [sample.row_index for sample in samples],
        [[] if sample.error else _image_cell(sample) for sample in samples],
        [[] if sample.error else [asdict(ref) for ref in sample.videos] for sample in samples],
        [json.dumps(sample.fields) for sample in samples],
        [sample.error.code if sample.error else "" for sample in samples],
        [_message(sample.error) if sample.error else "" for sample in samples],
    ]
    schema = schemas.read_schema(spec.keep)
    columns = [pa.array(column, field.type) for column, field in zip(values, schema, strict=False)]
    return pa.table([*columns, *keep], schema=schema)


def _image_cell(sample: Sample) -> list[dict[str, bytes | str]]:
    return [{"uri": image} if isinstance(image, str) else {"bytes": image} for image in sample.images]


def path_id(path: str, row_index: int) -> str:
    """Return the id of a sample without an id column: `path#row_index`."""
    return f"{path}#{row_index}"


def _repeated_id(sample_id: str) -> RowError:
    return RowError("duplicate_id", f"the id {sample_id[:100]!r} is there twice")


def _with_unique_ids(table: pa.Table) -> pa.Table:
    """Give a row whose id an earlier row has the id `path#row_index` and the error `duplicate_id`."""
    ids = table["sample_id"].to_pylist()
    if len(set(ids)) == len(ids):
        return table
    codes, messages, cells = (table[name].to_pylist() for name in ("error_type", "error_message", "images"))
    paths, row_indices = table["source"].to_pylist(), table["row_index"].to_pylist()
    seen: set[str] = set()
    for index, sample_id in enumerate(ids):
        if sample_id in seen:
            ids[index] = path_id(paths[index], row_indices[index])
            while ids[index] in seen:  # the id column of another row holds this `path#row_index`
                ids[index] += "#"
            if not codes[index]:
                error = _repeated_id(sample_id)
                codes[index], messages[index], cells[index] = error.code, _message(error), []
        seen.add(ids[index])
    for name, values in (("sample_id", ids), ("error_type", codes), ("error_message", messages), ("images", cells)):
        position = table.schema.get_field_index(name)
        field = table.schema.field(position)
        table = table.set_column(position, field, pa.array(values, field.type))
    return table


def _message(error: RowError) -> str:
    message = whole_text(error.message)
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 3] + "..."
