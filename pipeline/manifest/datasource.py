"""Reads a frozen manifest as a Ray Data source with one read task per span, or in the calling process without Ray.

Every read task returns exactly one table, which `pipeline.manifest.span_reader` reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from configs.source import SourceConfig
from pipeline.formats import kind_of
from pipeline.formats.kind import FilePiece, ReadSpec
from pipeline.manifest import spans
from pipeline.manifest.done_bitmap import UNKNOWN, DoneBitmap, Ints
from pipeline.manifest.manifest import Manifest
from pipeline.manifest.shards import plan_shard
from pipeline.manifest.span_files import SpanFiles
from pipeline.manifest.span_reader import NoteCount, opened, read_span
from pipeline.rows import schemas

if TYPE_CHECKING:
    from ray.data import DataContext

MAX_GAP_ROWS = 16


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
        source: SourceConfig,
        manifest: Manifest,
        fields: tuple[str, ...] = (),
        limit: int | None = None,
        with_images: bool = True,
        done: DoneBitmap | None = None,
        note_count: NoteCount | None = None,
        shard: int = 0,
        has_conversations: bool = False,
    ) -> None:
        super().__init__()
        self._spec = ReadSpec(source, manifest.root, fields, manifest.keep, with_images, has_conversations)
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

    def read_rows(self, rows: Collection[tuple[str, int]]) -> pa.Table:
        """Read some samples, as (path, row index), in the calling process; unknown ones are left out.

        A range of a file is read as a whole if its gaps are at most `MAX_GAP_ROWS`.
        """
        paths = self._manifest.files["path"]
        wanted = pc.is_in(paths, value_set=pa.array(sorted({path for path, _ in rows}), paths.type))
        files = np.flatnonzero(wanted.combine_chunks().to_numpy(zero_copy_only=False))
        ordinals = {paths[int(file)].as_py(): int(file) for file in files}
        pairs = np.array(sorted((ordinals[path], row) for path, row in rows if path in ordinals), np.int64).reshape(
            -1, 2
        )
        if not len(pairs):
            return self.schema.empty_table()
        is_next = (np.diff(pairs[:, 0]) == 0) & (np.diff(pairs[:, 1]) <= MAX_GAP_ROWS)
        firsts = np.flatnonzero(np.append(True, ~is_next))
        lasts = np.append(firsts[1:], len(pairs)) - 1
        one_span = np.array([len(firsts)], np.int64)
        ranges = spans.Spans(pairs[firsts, 0], pairs[firsts, 1], pairs[lasts, 1] + 1, one_span)
        table = read_span(self._spec, list(SpanFiles(self._manifest, ranges, 0)))
        row_keys = zip(table["source"].to_pylist(), table["row_index"].to_pylist(), strict=True)
        keys = frozenset(rows)
        return table.filter(pa.array([key in keys for key in row_keys], pa.bool_()))

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
        for index in np.flatnonzero(counts == UNKNOWN):
            num_rows -= int(self._done.rows(int(files[index]), int(starts[index]), int(stops[index])).sum())
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
    max_rows, max_bytes = spec.source.span_max_rows, spec.source.span_max_bytes
    planned = plan_shard(manifest.files, manifest.cuts, shard, max_rows, max_bytes)
    if limit is None:
        return planned
    filesystem, spec = opened(spec)
    counts, paths = manifest.files["num_samples"], manifest.files["path"]

    def num_samples(file: int, at_most: int) -> int:
        known = counts[file].as_py()
        if known is not None:
            return int(known)
        return kind_of(spec.source.kind).count(filesystem, spec, paths[file].as_py(), at_most)

    return spans.take(planned, limit, num_samples)


def read_first(
    source: SourceConfig,
    manifest: Manifest,
    fields: tuple[str, ...],
    limit: int,
    with_images: bool = True,
    shard: int = 0,
    has_conversations: bool = False,
) -> pa.Table:
    """Read the first `limit` samples of a shard in the calling process, without Ray: one table with
    `schemas.read_schema`."""
    datasource = SpanDatasource(
        source, manifest, fields, limit, with_images, shard=shard, has_conversations=has_conversations
    )
    tables = [datasource.read(number) for number in range(datasource.num_spans)]
    return pa.concat_tables([datasource.schema.empty_table(), *tables])


def _read_blocks(spec: ReadSpec, pieces: Iterable[FilePiece], note_count: NoteCount | None) -> Iterator[pa.Table]:
    yield read_span(spec, list(pieces), note_count)
