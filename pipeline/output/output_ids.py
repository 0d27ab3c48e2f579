"""Reads the ids of an output's rows for `pipeline.source.ids`, which finds ids that occur more than once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.cluster.partitions import IN_PROCESS, Partition, Workers
from pipeline.output.accounts import locate
from pipeline.output.files import PARTITION_FILES, RESULT_FILE_S, read_all_found
from pipeline.source.done_bitmap import DoneBitmap, Ints, PathIndex
from pipeline.source.id_hashes import hash_ids
from pipeline.source.ids import HASHES, IDS, find_repeats, repeated_ids
from pipeline.source.manifest import Manifest
from pipeline.storage import access
from pipeline.storage.output_dir import OutputDir

ID_COLUMNS = ("sample_id", "source", "row_index")


def repeated_samples(
    output: OutputDir, names: Sequence[str], manifest: Manifest, num_rows: int, workers: Workers = IN_PROCESS
) -> pa.Table:
    """Return the samples (`ids.IDS`, by their place in the source) with a row whose id a row of an earlier sample has.

    `names` are published files, which hold about `num_rows` rows.
    """
    reader = OutputIds(output, tuple(names), workers, PathIndex(manifest.files["path"]))
    return find_repeats(reader, DoneBitmap(manifest.counts), num_rows)


def ids_of_several_rows(output: OutputDir, names: Sequence[str]) -> list[str]:
    """Return the sorted, distinct ids that several rows of these files have; files that cannot be read are left out."""
    counts = np.array([_num_rows(output, name) for name in names], np.int64)
    reader = OutputIds(output, tuple(names), IN_PROCESS, None)
    return repeated_ids(reader, DoneBitmap(counts), int(counts.sum()))


def _num_rows(output: OutputDir, name: str) -> int:
    try:
        with access.open_file(output.filesystem, output.path(name)) as file:
            return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowException, FileNotFoundError):  # the audit reports the file
        return 0


@dataclass(frozen=True)
class OutputIds:
    """Ids of the rows of published files. The place of a row is its sample's place in the source if `paths` is set,
    otherwise the index of the file in `names` and the index of the row in the file."""

    output: OutputDir
    names: tuple[str, ...]
    workers: Workers
    paths: PathIndex | None

    def hashes(self) -> Iterator[pa.Table]:
        for table in self._read(_hashed):
            files, rows = self._places(table)
            yield pa.table([table["hash"], files.astype(np.int32), rows], schema=HASHES)

    def ids(self, suspects: DoneBitmap) -> Iterator[pa.Table]:
        for table in self._read(_unhashed):
            files, rows = self._places(table)
            is_suspect = suspects.is_inside(files, rows)
            is_suspect[is_suspect] = suspects.has(files[is_suspect], rows[is_suspect])
            places = [files[is_suspect].astype(np.int32), rows[is_suspect]]
            yield pa.table([table["sample_id"].filter(pa.array(is_suspect)), *places], schema=IDS)

    def _places(self, table: pa.Table) -> tuple[Ints, Ints]:
        if self.paths is not None:
            [found] = locate([table], self.paths)
            return found.files, found.rows
        return table["number"].to_numpy(), table["row"].to_numpy()

    def _read(self, change: Any) -> Iterator[pa.Table]:
        parts = [
            Partition((start, names), len(names), names[0], names[-1])
            for start in range(0, len(self.names), PARTITION_FILES)
            for names in [self.names[start : start + PARTITION_FILES]]
        ]
        columns = ID_COLUMNS if self.paths is not None else ("sample_id",)
        read = partial(_read_part, self.output, columns, change)
        yield from self.workers.map(read, parts, RESULT_FILE_S * len(self.names), "comparison of ids", "sink.path")


def _read_part(output: OutputDir, columns: Sequence[str], change: Any, item: tuple[int, Sequence[str]]) -> pa.Table:
    first, names = item
    tables = []
    for number, one in enumerate(read_all_found(output, names, columns), first):
        if one.table is not None:
            places = {"number": np.full(one.table.num_rows, number), "row": np.arange(one.table.num_rows)}
            ids = one.table["sample_id"].cast(pa.large_string())
            kept = {name: one.table[name] for name in columns if name != "sample_id"}
            tables.append(pa.table({"sample_id": ids, **kept, **places}))
    empty = dict.fromkeys(("source",), pa.array([], pa.string()))
    empty |= {name: pa.array([], pa.int64()) for name in ("row_index", "number", "row")}
    if not tables:
        tables = [pa.table({"sample_id": pa.array([], pa.large_string()), **empty})]
    return change(pa.concat_tables(tables).combine_chunks())


def _hashed(table: pa.Table) -> pa.Table:
    ids = table["sample_id"].combine_chunks()
    return table.drop_columns("sample_id").append_column("hash", pa.array(hash_ids(ids), pa.uint64()))


def _unhashed(table: pa.Table) -> pa.Table:
    return table
