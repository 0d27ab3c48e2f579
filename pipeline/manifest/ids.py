"""Finds rows whose id an earlier row has, with memory for one hash partition at a time.

Hashes of all ids are written to partitions in a temporary folder (`_Buckets`). Within a partition, rows with equal
hashes are suspects. Only the ids of suspects are read again, partitioned the same way, and compared in full. Besides a
partition, the process keeps one bit per row if there is a suspect, and the repeated rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from pipeline.manifest.done_bitmap import DoneBitmap
from pipeline.manifest.id_hashes import Hashes, hash_ids

HASHES = pa.schema([("hash", pa.uint64()), ("file", pa.int32()), ("row", pa.int64())])
"""Hashes of ids and the places of their rows: the file's ordinal and the row's index in the file."""
IDS = pa.schema([("sample_id", pa.large_string()), ("file", pa.int32()), ("row", pa.int64()), ("rank", pa.int32())])
"""Ids, the places of their rows, and a rank that comes before the place in the order of rows with equal ids."""
IDS_PER_PARTITION = 4_000_000
"""About the number of ids of one hash partition: 20 bytes per id in the folder, and 60 bytes in memory."""
MAX_PARTITIONS = 4096
"""Maximum number of hash partitions. Above 16 billion ids, partitions become larger."""


class IdReader(Protocol):
    """Reads the ids of a source or of an output, each time in the same order; rows without an id are left out."""

    def hashes(self) -> Iterator[pa.Table]:
        """Yield tables of `HASHES` with all rows."""
        ...

    def ids(self, suspects: DoneBitmap) -> Iterator[pa.Table]:
        """Yield tables of `IDS` with the rows that are in `suspects`."""
        ...


def find_repeats(reader: IdReader, suspects: DoneBitmap, num_ids: int) -> pa.Table:
    """Return the rows (`IDS`, by file and row) whose id a row of a smaller rank, or of the same rank and an earlier
    place, has; rows of one rank at the same place are one.

    `suspects` is an empty set of the places of all rows; `num_ids` is their estimated number.
    """
    with tempfile.TemporaryDirectory(prefix="draftfleet-ids-") as folder:
        hashes = _Buckets(Path(folder, "hashes"), HASHES, num_ids)
        for table in reader.hashes():
            hashes.add(table, table["hash"].to_numpy())
        num_suspects = 0
        for table in hashes.drain():
            repeated = _repeated(table["hash"].to_numpy())
            if len(repeated):
                rows = table.filter(pa.array(np.isin(table["hash"].to_numpy(), repeated)))
                num_suspects += _add(suspects, rows)
        if not num_suspects:
            return IDS.empty_table()
        ids = _Buckets(Path(folder, "ids"), IDS, num_suspects)
        for table in reader.ids(suspects):
            ids.add(table, hash_ids(table["sample_id"].combine_chunks()))
        repeats = pa.concat_tables([IDS.empty_table(), *map(_later_rows, ids.drain())])
    return repeats.sort_by([(name, "ascending") for name in ("file", "row", "sample_id")])


def repeated_ids(reader: IdReader, suspects: DoneBitmap, num_ids: int) -> list[str]:
    """Return the sorted, distinct ids that several places have; the arguments are those of `find_repeats`."""
    ids: list[str] = find_repeats(reader, suspects, num_ids)["sample_id"].unique().to_pylist()
    return sorted(ids)


def _repeated(hashes: Hashes) -> Hashes:
    """Return the distinct hashes that occur more than once."""
    ordered = np.sort(hashes)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def _add(suspects: DoneBitmap, table: pa.Table) -> int:
    """Add rows to the suspects and return their number. Rows beyond the count of their file are left out: the file has
    changed since it was listed, and its read task reports that."""
    files, rows = table["file"].to_numpy().astype(np.int64), table["row"].to_numpy()
    is_inside = suspects.is_inside(files, rows)
    suspects.add(files[is_inside], rows[is_inside])
    return int(is_inside.sum())


def _later_rows(table: pa.Table) -> pa.Table:
    """Return the rows at another place than the first row with the same id, each rank and place once."""
    codes = table["sample_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    files, rows, ranks = (table[name].to_numpy() for name in ("file", "row", "rank"))
    order = np.lexsort((rows, files, ranks, codes))
    codes, files, rows, ranks = codes[order], files[order], rows[order], ranks[order]
    is_same = (codes[1:] == codes[:-1]) & (files[1:] == files[:-1]) & (rows[1:] == rows[:-1])
    is_repeat = np.concatenate([[False], (codes[1:] == codes[:-1]) & ~is_same]) if len(codes) else np.zeros(0, bool)
    return table.take(pa.array(order[is_repeat]))


class _Buckets:
    """Tables of one schema, partitioned by hash into files of a folder; a file is a sequence of Arrow IPC streams."""

    def __init__(self, folder: Path, schema: pa.Schema, num_rows: int) -> None:
        folder.mkdir()
        self._folder, self._schema = folder, schema
        self._count = min(MAX_PARTITIONS, max(1, -(-num_rows // IDS_PER_PARTITION)))

    def add(self, table: pa.Table, hashes: Hashes) -> None:
        """Append rows; the partition of a row follows from its hash."""
        buckets = ((hashes >> np.uint64(32)) * np.uint64(self._count)) >> np.uint64(32)
        order = np.argsort(buckets.astype(np.uint16), kind="stable")
        ends = np.cumsum(np.bincount(buckets.astype(np.int64), minlength=self._count))
        table = table.take(pa.array(order)) if self._count > 1 else table
        for number, (low, high) in enumerate(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)):
            if low < high:
                with self._path(number).open("ab") as file, pa.ipc.new_stream(file, self._schema) as stream:
                    stream.write_table(table.slice(low, high - low))

    def drain(self) -> Iterator[pa.Table]:
        """Yield every partition that has rows, in the order of the rows, and delete its file."""
        for number in range(self._count):
            path = self._path(number)
            if path.exists():
                size = path.stat().st_size
                with path.open("rb") as file:
                    table = pa.concat_tables(_streams(file, size))
                path.unlink()
                yield table

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:04d}"


def _streams(file: Any, size: int) -> Iterator[pa.Table]:
    while file.tell() < size:
        yield pa.ipc.open_stream(file).read_all()
