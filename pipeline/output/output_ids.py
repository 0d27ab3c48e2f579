"""Reads the ids of an output's rows for `pipeline.manifest.ids`, which finds ids that occur more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.cluster.partitions import IN_PROCESS, Partition, Workers
from pipeline.manifest.done_bitmap import DoneBitmap, Ints, PathIndex
from pipeline.manifest.id_hashes import hash_ids
from pipeline.manifest.ids import HASHES, IDS, find_repeats, repeated_ids
from pipeline.manifest.manifest import Manifest
from pipeline.output.accounts import locate
from pipeline.output.files import PARTITION_FILES, RESULT_FILE_S, list_published, read_all_found, shard_of
from pipeline.output.turns import UNRANKED, Turns
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir
from pipeline.storage.parquet_files import DamagedParquet, open_parquet

ID_COLUMNS = ("sample_id", "source", "row_index")
MAX_LISTINGS = 16
"""Maximum number of listings of published files in one comparison; each further one reads only files that are new."""


def repeated_samples(
    output: OutputDir, manifest: Manifest, num_rows: int, workers: Workers = IN_PROCESS, turns: Turns | None = None
) -> pa.Table:
    """Return the samples (`ids.IDS`, by their place in the source) with a row whose id a row of an earlier sample has.

    `num_rows` is the estimated number of published rows. With `turns` the ids of all shards that have taken a turn are
    compared, in the order of `pipeline.output.turns`.
    """
    reader = OutputIds(output, partial(_ranked_names, output, turns), workers, PathIndex(manifest.files["path"]), turns)
    return find_repeats(reader, DoneBitmap(manifest.counts), num_rows)


def _ranked_names(output: OutputDir, turns: Turns | None) -> list[str]:
    if turns is None:
        return list_published(output, DATA, ERRORS)
    return [name for name in list_published(output, DATA, ERRORS) if shard_of(name) in turns.shards]


def ids_of_several_rows(output: OutputDir, names: Sequence[str]) -> list[str]:
    """Return the sorted, distinct ids that several rows of these files have; files that cannot be read are left out."""
    counts = np.array([_num_rows(output, name) for name in names], np.int64)
    reader = OutputIds(output, lambda: names, IN_PROCESS, None)
    return repeated_ids(reader, DoneBitmap(counts), int(counts.sum()))


def _num_rows(output: OutputDir, name: str) -> int:
    try:
        with open_parquet(output.filesystem, output.path(name)) as parquet:
            return int(parquet.metadata.num_rows)
    except (DamagedParquet, OSError):  # the check reports the file
        return 0


@dataclass(frozen=True)
class OutputIds:
    """Ids of the rows of published files. The place of a row is its sample's place in the source if `paths` is set,
    otherwise the index of the file among all files and the index of the row in the file.

    Files that `names` returns for the first time after the others were read are read as well: the driver of another
    shard may have published their rows again and emptied the first file.
    """

    output: OutputDir
    names: Callable[[], Sequence[str]]
    workers: Workers
    paths: PathIndex | None
    turns: Turns | None = None
    """With turns, rows that have no rank are left out."""

    def hashes(self) -> Iterator[pa.Table]:
        for table in self._read(_hashed):
            files, rows = self._positions(table)
            yield pa.table([table["hash"], files.astype(np.int32), rows], schema=HASHES)

    def ids(self, suspects: DoneBitmap) -> Iterator[pa.Table]:
        for table in self._read(_unhashed):
            files, rows = self._positions(table)
            is_suspect = suspects.is_inside(files, rows)
            is_suspect[is_suspect] = suspects.has(files[is_suspect], rows[is_suspect])
            table = table.filter(pa.array(is_suspect))
            columns = [files[is_suspect].astype(np.int32), rows[is_suspect], table["rank"]]
            yield pa.table([table["sample_id"], *columns], schema=IDS)

    def _positions(self, table: pa.Table) -> tuple[Ints, Ints]:
        if self.paths is not None:
            [located] = locate([table], self.paths)
            return located.files, located.rows
        return table["number"].to_numpy(), table["row"].to_numpy()

    def _read(self, change: Any) -> Iterator[pa.Table]:
        columns = ID_COLUMNS if self.paths is not None else ("sample_id",)
        read = partial(_read_part, self.output, columns, self.turns, change)
        known: set[str] = set()
        for _ in range(MAX_LISTINGS):
            names = [name for name in self.names() if name not in known]
            if not names:
                return
            parts = [
                Partition((len(known) + start, some), len(some), some[0], some[-1])
                for start in range(0, len(names), PARTITION_FILES)
                for some in [names[start : start + PARTITION_FILES]]
            ]
            yield from self.workers.map(read, parts, RESULT_FILE_S * len(names), "comparison of ids", "sink.path")
            known.update(names)
        raise RuntimeError(
            f"{self.output.shown()}: new files were published {MAX_LISTINGS} times while ids were compared; start the "
            "shard again"
        )


def _read_part(
    output: OutputDir, columns: Sequence[str], turns: Turns | None, change: Any, item: tuple[int, Sequence[str]]
) -> pa.Table:
    first, names = item
    read = columns if turns is None else (*columns, "attempt")
    tables = []
    for number, file in enumerate(read_all_found(output, names, read), first):
        if file.table is not None:
            size = file.table.num_rows
            ranks = np.zeros(size, np.int64)
            if turns is not None and size:
                ranks = turns.ranks(shard_of(file.relative), file.table["attempt"].to_numpy())
            ids = file.table["sample_id"].cast(pa.large_string())
            kept_columns = {name: file.table[name] for name in columns if name != "sample_id"}
            positions = {"number": np.full(size, number), "row": np.arange(size), "rank": pa.array(ranks, pa.int32())}
            table = pa.table({"sample_id": ids, **kept_columns, **positions})
            tables.append(table.filter(pa.array(ranks != UNRANKED)))
    empty = dict.fromkeys(("source",), pa.array([], pa.string()))
    empty |= {name: pa.array([], pa.int64()) for name in ("row_index", "number", "row")}
    if not tables:
        tables = [pa.table({"sample_id": pa.array([], pa.large_string()), **empty, "rank": pa.array([], pa.int32())})]
    return change(pa.concat_tables(tables).combine_chunks())


def _hashed(table: pa.Table) -> pa.Table:
    ids = table["sample_id"].combine_chunks()
    return table.drop_columns("sample_id").append_column("hash", pa.array(hash_ids(ids), pa.uint64()))


def _unhashed(table: pa.Table) -> pa.Table:
    return table
