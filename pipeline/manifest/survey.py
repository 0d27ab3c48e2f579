"""Surveys the files of a source and compares their ids, in partitions of files and of ranges of large files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs.source import SourceConfig
from pipeline.cluster.partitions import BYTE_S, FILE_S, ID_S, PARSED_ID_S, REMOTE_FILE_S, Partition, Workers
from pipeline.formats import kind_of
from pipeline.formats.kind import (
    FACTS,
    RANGES,
    FilePiece,
    IdRows,
    Needs,
    ReadSpec,
    SourceKind,
    Survey,
    SurveyCost,
    survey_of,
)
from pipeline.formats.tables import KeptTypes
from pipeline.manifest import spans
from pipeline.manifest.done_bitmap import UNKNOWN, Bools, DoneBitmap, Ints
from pipeline.manifest.id_hashes import hash_ids
from pipeline.manifest.ids import HASHES, IDS, find_repeats
from pipeline.manifest.span_files import SpanFiles
from pipeline.storage import access

if TYPE_CHECKING:
    from pipeline.manifest.manifest import Manifest

RANGE_BYTES = 64 * 1024 * 1024
"""Bytes of the ranges in which a large file of lines is indexed. The index depends on it, and not on the machine."""
PARTITION_FILES, PARTITION_BYTES, PARTITION_IDS = 1024, 64 * 1024 * 1024, 1_000_000
"""Maximum number of files, bytes of content, and ids of one partition; a file that cannot be cut may have more."""
MAX_ROUNDS = 4
"""Maximum rounds in which ranges that began inside a record are surveyed again; files with more are counted when
read."""
NO_BOUND = 1 << 60


# --- counting samples ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Surveyed:
    """The `FACTS` of all listed files, one row per file, and the types of the kept columns."""

    facts: pa.Table
    keep: pa.Schema


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs, workers: Workers) -> Surveyed:
    """Count the samples of the listed files, and unify the types of kept columns over all files.

    Raises:
        ConfigError: the files lack a needed column, or columns have unusable or different types.
    """
    kind = kind_of(needs.source.kind)
    selected = kind.select(filesystem, root, files, needs) if kind.select else None
    if selected is None:
        return _surveyed(kind, filesystem, root, files, needs, workers)
    used = np.array(selected.used, bool)
    surveyed = _surveyed(selected.kind, filesystem, root, files.filter(pa.array(used)), needs, workers)
    without_rows = pa.table([[0], [[]], [[]], [[]]], schema=FACTS)
    rows = np.where(used, np.cumsum(used) - 1, surveyed.facts.num_rows)
    return Surveyed(pa.concat_tables([surveyed.facts, without_rows]).take(pa.array(rows)), surveyed.keep)


def _surveyed(
    kind: SourceKind, filesystem: Any, root: str, files: pa.Table, needs: Needs, workers: Workers
) -> Surveyed:
    assert kind.survey is not None, kind.name
    types = KeptTypes(needs)
    if kind.cost is SurveyCost.NOTHING:
        return Surveyed(kind.survey(filesystem, root, files, needs).facts, types.schema)
    ranges, owners = _ranges(kind, files)

    def run(chosen: pa.Table) -> tuple[pa.Table, Ints]:
        """Survey some ranges; return their `FACTS`, and the byte at which the first record of each begins."""
        sizes = _content_bytes(chosen) if kind.cost is SurveyCost.CONTENT else np.zeros(chosen.num_rows, np.int64)
        work_s = _file_s(filesystem) * chosen.num_rows + BYTE_S * int(sizes.sum())
        tables, begins = [FACTS.empty_table()], list[int]()
        survey_part = partial(_survey_part, kind, filesystem, root, needs)
        for part in workers.map(survey_part, _partitions(chosen, sizes), work_s, "survey"):
            for path, schema in part.schemas:
                types.add(schema, path)
            tables.append(part.facts)
            begins += part.begins
        return pa.concat_tables(tables), np.array(begins, np.int64)

    facts, begins = run(ranges)
    num_rounds = 0
    while wrong := _begun_inside(ranges, owners, facts, begins):
        num_rounds += 1
        indices = np.array(list(wrong))
        if num_rounds <= MAX_ROUNDS:
            starts = _replaced(ranges["start"], wrong)
            ranges = ranges.set_column(ranges.schema.get_field_index("start"), "start", starts)
            again, begins[indices] = run(ranges.take(pa.array(indices)))
        else:  # their files are counted by the tasks that read them
            again = survey_of([None] * len(indices)).facts
        order = np.arange(len(owners))
        order[indices] = len(owners) + np.arange(len(indices))
        facts = pa.concat_tables([facts, again]).take(pa.array(order))
    return Surveyed(_of_files(facts, owners), types.schema)


def _begun_inside(ranges: pa.Table, owners: Ints, facts: pa.Table, begins: Ints) -> dict[int, int]:
    """Return the ranges whose survey began inside a record of the range before, with the byte to begin at instead.

    A record that spans lines, as a quoted field of CSV does, can cross the beginning of a range.
    """
    lists = facts["row_group_bytes"].combine_chunks()
    ends = np.append(0, np.cumsum(lists.values.to_numpy()))[lists.offsets.to_numpy()]
    sizes, stops = np.diff(ends), ranges["stop"].fill_null(NO_BOUND).to_numpy()
    is_known = np.ones(int(owners[-1]) + 1 if len(owners) else 0, bool)
    is_known[owners[facts["num_samples"].is_null().to_numpy()]] = False
    is_first = np.append(True, np.diff(owners) != 0)
    positions: dict[int, int] = {}
    end = 0
    for index in np.flatnonzero(is_known[owners] & (np.bincount(owners)[owners] > 1)).tolist():
        if is_first[index]:
            end = 0
        if begins[index] < 0:
            continue  # no record begins in this range
        if begins[index] != end:
            positions[index] = min(end, int(stops[index]))
        end = max(end, int(begins[index] + sizes[index]))
    return positions


def _replaced(column: pa.ChunkedArray, values: dict[int, int]) -> pa.Array:
    changed = column.to_numpy().copy()
    changed[list(values)] = list(values.values())
    return pa.array(changed)


def _survey_part(kind: SourceKind, filesystem: Any, root: str, needs: Needs, ranges: pa.Table) -> Survey:
    assert kind.survey is not None, kind.name
    return kind.survey(filesystem, root, ranges, needs)


def _ranges(kind: SourceKind, files: pa.Table) -> tuple[pa.Table, Ints]:
    """Cut large files that can be split into ranges of `RANGE_BYTES`; return the ranges and the index of the file of
    each."""
    sizes = files["size_bytes"].to_numpy()
    counts = np.ones(files.num_rows, np.int64)
    for file in np.flatnonzero(sizes > RANGE_BYTES).tolist():
        if kind.can_split(files["path"][file].as_py()):
            counts[file] = -(-int(sizes[file]) // RANGE_BYTES)
    owners = np.repeat(np.arange(files.num_rows), counts)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_last = numbers == counts[owners] - 1
    starts = pa.array(numbers * RANGE_BYTES)
    stops = pa.array((numbers + 1) * RANGE_BYTES, pa.int64(), mask=is_last)
    ranges = files if len(owners) == files.num_rows else files.take(pa.array(owners))
    return pa.table([*ranges.columns, starts, stops], schema=pa.schema([*files.schema, *RANGES])), owners


def _content_bytes(ranges: pa.Table) -> Ints:
    ends = pc.coalesce(ranges["stop"], ranges["size_bytes"])
    return np.asarray(pc.subtract(ends, ranges["start"]).to_numpy())


def _file_s(filesystem: Any) -> float:
    return FILE_S if access.is_local(filesystem) else REMOTE_FILE_S


def _partitions(ranges: pa.Table, sizes: Ints) -> list[Partition[pa.Table]]:
    numbers = np.arange(ranges.num_rows) // PARTITION_FILES
    by_bytes = (np.cumsum(sizes) - sizes) // PARTITION_BYTES
    is_first = np.ones(ranges.num_rows, bool)
    is_first[1:] = (np.diff(numbers) != 0) | (np.diff(by_bytes) != 0)
    bounds = [*np.flatnonzero(is_first).tolist(), ranges.num_rows]
    partitions = []
    for low, high in pairwise(bounds):
        part = ranges.slice(low, high - low)  # Ray sends a slice without the rest of its buffers
        partitions.append(Partition(part, high - low, part["path"][0].as_py(), part["path"][-1].as_py()))
    return partitions


def _of_files(facts: pa.Table, owners: Ints) -> pa.Table:
    """Join the facts of the ranges of a file: row groups one after the other, and the sum of the numbers of samples."""
    facts = facts.combine_chunks()
    is_first = np.ones(len(owners), bool)
    is_first[1:] = np.diff(owners) != 0
    firsts = np.flatnonzero(is_first)
    if len(firsts) == len(owners):
        return facts
    counts = facts["num_samples"].fill_null(UNKNOWN).to_numpy()
    totals = np.add.reduceat(counts, firsts)
    is_unknown = np.logical_or.reduceat(counts == UNKNOWN, firsts)
    columns = [pa.array(totals, pa.int64(), mask=is_unknown)]
    for name in FACTS.names[1:]:
        lists = facts[name].combine_chunks()
        offsets = pa.array(np.append(lists.offsets.to_numpy()[firsts], lists.offsets[-1].as_py()), pa.int32())
        joined = pa.ListArray.from_arrays(offsets, lists.values)
        columns.append(pc.if_else(pa.array(is_unknown), pa.scalar([], joined.type), joined))
    return pa.table(columns, schema=FACTS)


# --- comparing ids -------------------------------------------------------------------------------------------------


def repeated_rows(filesystem: Any, root: str, source: SourceConfig, manifest: Manifest, workers: Workers) -> pa.Table:
    """Return the rows (`ids.IDS`) of the manifest's files whose id an earlier row has."""
    return find_repeats(
        SourceIds(filesystem, root, source, manifest, workers), DoneBitmap(manifest.counts), _estimated_ids(manifest)
    )


ASSUMED_ID_BYTES = 32
"""Assumed bytes per sample when the ids of files of unknown count are partitioned."""


def _estimated_ids(manifest: Manifest) -> int:
    counts = manifest.counts
    sizes = manifest.files["size_bytes"].to_numpy()
    return int(np.where(counts == UNKNOWN, sizes // ASSUMED_ID_BYTES, counts).sum())


@dataclass(frozen=True)
class SourceIds:
    """Reads the ids of a manifest's files in partitions, cut like spans (`pipeline.manifest.spans`)."""

    filesystem: Any
    root: str
    source: SourceConfig
    manifest: Manifest
    workers: Workers

    @cached_property
    def _spec(self) -> ReadSpec:
        return ReadSpec(self.source, self.root, (), pa.schema([])).with_ids_only(self.source.id_column)

    @cached_property
    def _kind(self) -> SourceKind:
        return kind_of(self.source.kind)

    @cached_property
    def _spans(self) -> spans.Spans:
        reads_content = self._kind.cost is SurveyCost.CONTENT
        return spans.plan(self.manifest.files, PARTITION_IDS, PARTITION_BYTES if reads_content else NO_BOUND)

    def hashes(self) -> Iterator[pa.Table]:
        read = partial(_read_hashes, self._kind, self.filesystem, self._spec)
        files = [SpanFiles(self.manifest, self._spans, number) for number in range(len(self._spans))]
        yield from self.workers.map(read, [_named(file, file) for file in files], self._work_s(self._spans), "id check")

    def ids(self, suspects: DoneBitmap) -> Iterator[pa.Table]:
        read = partial(_read_suspects, self._kind, self.filesystem, self._spec)
        spans = self._spans.kept(self._has_suspects(suspects))
        files = [SpanFiles(self.manifest, spans, number) for number in range(len(spans))]
        parts = [_named(file, (file, _bits_of(file, suspects))) for file in files]
        yield from self.workers.map(read, parts, self._work_s(spans), "id comparison")

    def _has_suspects(self, suspects: DoneBitmap) -> Bools:
        files, starts, stops = self._spans.files, self._spans.starts, self._spans.stops
        mask = suspects.num_in(files, starts, stops) > 0
        for index in np.flatnonzero(suspects.counts[files] == UNKNOWN):
            mask[index] = suspects.rows(int(files[index]), 0, None).any()
        return np.asarray(mask)

    def _work_s(self, planned: spans.Spans) -> float:
        num_rows = int(np.maximum(self.manifest.counts[np.unique(planned.files)], 0).sum())
        id_s = PARSED_ID_S if self._kind.cost is SurveyCost.CONTENT else ID_S
        return _file_s(self.filesystem) * len(planned.files) + id_s * num_rows


def _named(files: SpanFiles, item: Any) -> Partition[Any]:
    ordinals, _, _ = files.spans.columns(files.number)
    first, last = (files.manifest.files["path"][int(ordinal)].as_py() for ordinal in (ordinals[0], ordinals[-1]))
    return Partition(item, len(ordinals), first, last)


def _bits_of(files: SpanFiles, suspects: DoneBitmap) -> list[bytes]:
    """Return one bit per row of every piece of a span, 1 for suspects, in `numpy.packbits` order."""
    return [
        np.packbits(suspects.rows(int(file), int(start), spans.end_of(stop))).tobytes()
        for file, start, stop in zip(*files.spans.columns(files.number), strict=True)
    ]


def _read_hashes(kind: SourceKind, filesystem: Any, spec: ReadSpec, pieces: Sequence[FilePiece]) -> pa.Table:
    """Return the hashes of the ids of some files (`ids.HASHES`)."""
    tables = [HASHES.empty_table()]
    for piece in pieces:
        for rows, ids in _ids_of(kind, filesystem, spec, piece):
            tables.append(pa.table([hash_ids(ids), np.full(len(rows), piece.ordinal, np.int32), rows], schema=HASHES))
    return pa.concat_tables(tables).combine_chunks()


def _read_suspects(
    kind: SourceKind, filesystem: Any, spec: ReadSpec, item: tuple[Sequence[FilePiece], list[bytes]]
) -> pa.Table:
    """Return the ids of the suspected rows of some files (`ids.IDS`)."""
    tables = [IDS.empty_table()]
    for piece, bits in zip(*item, strict=True):
        suspected = piece.start + np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8)))
        for rows, ids in _ids_of(kind, filesystem, spec, piece):
            is_suspect = np.isin(rows, suspected)
            ordinals = np.full(int(is_suspect.sum()), piece.ordinal, np.int32)
            columns = [ids.filter(pa.array(is_suspect)), ordinals, rows[is_suspect], np.zeros_like(ordinals)]
            tables.append(pa.table(columns, schema=IDS))
    return pa.concat_tables(tables).combine_chunks()


def _ids_of(kind: SourceKind, filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[IdRows]:
    """Yield the ids of a piece; stop without an error if the file is damaged."""
    try:
        yield from kind.ids(filesystem, spec, piece)
    except Exception:  # the read task reports the error
        return
