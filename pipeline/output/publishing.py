"""Publishes finished rows: writes them durably to the spool, then file by file to `data/` and `errors/`.

Published files are a sequence: file k is created only if it does not exist, and only after all files up to k − w exist,
because up to w = `WINDOW` tasks of an attempt publish at the same time (`FileNumbers`). A new attempt first fills gaps
and then the next w numbers with empty files. An older attempt fails to create these numbers and ends (`Fenced`), so a
driver that was presumed dead publishes nothing. A name is never reused: a file that is set aside, or whose rows are all
superseded, is replaced by an empty one.

Before every move, delete and overwrite, an attempt checks that no later one has started (`check_alone`). A store cannot
check and act in one step, so late operations must be harmless: names contain the attempt or are never reused, and an
overwrite only turns a published file into the same empty file. Operations may run twice or be killed at any point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.output.files import (
    SPOOL,
    Format,
    checksum_name,
    list_published,
    note_checksum,
    parts,
    published_name,
    published_number,
    read_found,
    split,
    spool_name,
    write_checksum,
)
from pipeline.output.inventory import Spooled
from pipeline.storage.damage import DamagedFile
from pipeline.storage.digests import digest_name
from pipeline.storage.output_dir import DATA, ERRORS, JOB, OutputDir
from pipeline.storage.parquet_files import DamagedParquet, read_parquet

FOLDERS = (DATA, ERRORS)
KEY_COLUMNS = ("source", "row_index", "sample_id")
WINDOW = {DATA: 4, ERRORS: 1}
"""Maximum numbers of a folder that tasks of one attempt publish at the same time. Outputs depend on it: never less."""


SET_ASIDE = "start the job again, which sets it aside and makes its rows again"


class Fenced(RuntimeError):
    """A later attempt has taken over."""


@dataclass(frozen=True)
class Publisher:
    """Writes the files of one attempt; cheap to send to a worker.

    Methods raise `Fenced`, without a change of the output, if a later attempt has taken over.
    """

    output: OutputDir
    format: Format
    attempt: int
    fingerprint: str
    rows_per_file: int = 10_000

    def spool(self, number: int, tables: Sequence[pa.Table]) -> list[Spooled]:
        """Write finished rows durably as the spool files with this number."""
        return self._spool(number, split(self._joined(tables)))

    def write(self, number: int, spool_number: int, tables: Sequence[pa.Table]) -> tuple[int | None, list[Spooled]]:
        """Publish the first `rows_per_file` results among finished rows from `number` on, and spool the other rows.

        Return the number of the file, None if there are no results, and the spool files. A repeated call may get rows
        that failed before, or the reverse: rows that the first call published are neither published nor spooled again.
        """
        table = self._joined(tables)
        results = split(table)[DATA].slice(0, self.rows_per_file)
        published = None
        if results.num_rows:
            published, there = self._publish_rows(DATA, number, results)
            table = table.filter(pc.invert(pc.is_in(_keys(table), value_set=there)))
        return published, self._spool(spool_number, split(table))

    def _joined(self, tables: Sequence[pa.Table]) -> pa.Table:
        return pa.concat_tables([self.format.schema.empty_table(), *(self.format.check(table) for table in tables)])

    def _spool(self, number: int, rows_of: dict[str, pa.Table]) -> list[Spooled]:
        done = []
        for folder, all_rows in rows_of.items():
            for part, rows in enumerate(parts(all_rows, self.rows_per_file)):
                relative = spool_name(self.attempt, number, part, folder)
                self.output.write_recorded(relative, self.format.serialise(rows, self.attempt, self.fingerprint))
                done.append(Spooled(relative, folder, rows.num_rows))
        return done

    def publish(self, folder: str, number: int, spooled: Sequence[Spooled]) -> int:
        """Publish the rows of these spool files as the first free number from `number` on; return that number."""
        return self.publish_rows(folder, number, pa.concat_tables([self._read(file) for file in spooled]))

    def _read(self, spooled: Spooled) -> pa.Table:
        table = self.read_rows(spooled.relative)
        if spooled.dropped:
            table = table.filter(pa.array(~np.isin(np.arange(table.num_rows), spooled.dropped)))
        if table.num_rows != spooled.num_rows:
            raise OSError(f"{spooled.relative} holds {table.num_rows} rows in place of {spooled.num_rows}")
        return self.format.check(table)

    def read_rows(self, relative: str) -> pa.Table:
        """Read the rows of a published file or a spool file; DamagedFile if it is damaged."""
        try:
            data = self.output.read_bytes(relative)
        except FileNotFoundError:
            self.check_alone()  # a later attempt has published and removed it
            raise
        try:
            return read_parquet(data)
        except DamagedParquet as error:
            raise DamagedFile(self.output.shown(relative), relative, str(error), SET_ASIDE) from None

    def fence(self, folder: str) -> int:
        """Publish empty files, so that older attempts cannot publish in this folder; return the next free number.

        An older attempt starts no number beyond the smallest one without a file plus `WINDOW`, and passes only numbers
        that have files. So it meets a file of this attempt if this one creates `WINDOW` files and leaves no gap.
        """
        used = {published_number(name) for name in list_published(self.output, folder)}
        number = 0
        for _ in range(WINDOW[folder]):
            while number in used:
                number += 1
            number = self.publish_rows(folder, number, self.format.schema.empty_table()) + 1
        return number

    def check_alone(self) -> None:
        """Raise `Fenced` if a later attempt has started."""
        newest = max(self.output.list_attempts(), default=self.attempt)
        if newest > self.attempt:
            raise self._fenced_by(newest)

    def _fenced_by(self, attempt: int) -> Fenced:
        return Fenced(f"attempt {attempt} of {self.output.shown()} has taken over from attempt {self.attempt}")

    # --- destructive operations: only while no later attempt has started ---

    def remove(self, relative: str) -> None:
        """Delete a spool file whose rows are published, or a damaged checksum record."""
        self.check_alone()
        self.output.remove(relative)

    def forget_spool(self) -> None:
        """Delete the digests of spool files that were published or set aside."""
        self.check_alone()
        start = len(f"{JOB}/")
        there = {f"{SPOOL}/{name}"[start:] for name in self.output.list_files(SPOOL)}
        for relative, digests in self.output.digests(SPOOL).items():
            for digest in digests if relative not in there else ():
                self.output.remove(digest_name(relative, digest))

    def set_aside(self, relative: str) -> None:
        """Move a file below `_job/aside/`; an empty file replaces a published one, so that its number stays used."""
        self.check_alone()
        if published_number(relative) is None or relative.partition("/")[0] not in FOLDERS:
            self.output.set_aside(relative)
            return
        empty = self._empty_file()
        self.output.record(relative, empty)
        self.output.set_aside(relative, stand_in=empty)
        write_checksum(self.output, relative, empty, 0)

    def empty(self, relative: str) -> None:
        """Replace a published file, whose rows are superseded, by an empty one."""
        self.check_alone()
        empty = self._empty_file()
        self.output.write_recorded(relative, empty)
        write_checksum(self.output, relative, empty, 0)

    def write_job_file(self, relative: str, data: bytes, is_recorded: bool = True) -> None:
        """Write or replace a file in `_job/` that describes the newest attempt; one that is replaced often need not
        have its digests recorded."""
        self.check_alone()
        (self.output.write_recorded if is_recorded else self.output.write_bytes)(relative, data)

    def _empty_file(self) -> pa.Buffer:
        """Return an empty Parquet file; its bytes are the same in every attempt, so concurrent writes are harmless."""
        attempts = self.output.list_attempts()
        first = attempts[0] if attempts else self.attempt
        fingerprint = str(self.output.read_attempt(first).get("config_fingerprint")) if attempts else self.fingerprint
        return self.format.serialise(self.format.schema.empty_table(), first, fingerprint)

    def publish_rows(self, folder: str, number: int, table: pa.Table) -> int:
        """Publish rows as the file with the first free number from `number` on; return that number.

        If a file of this attempt with some of these rows has one of these numbers, the call is a retry and changes
        nothing.
        """
        return self._publish_rows(folder, number, table)[0]

    def _publish_rows(self, folder: str, number: int, table: pa.Table) -> tuple[int, pa.Array]:
        """Call `publish_rows`; return also the keys of the rows in the file."""
        data, keys = self.format.serialise(table, self.attempt, self.fingerprint), _keys(table)
        while True:
            relative = published_name(folder, number)
            try:
                self.output.create_recorded(relative, data)
            except FileExistsError:
                there = read_found(self.output, relative, KEY_COLUMNS)
                if there.attempt > self.attempt:
                    raise self._fenced_by(there.attempt) from None
                if there.attempt == self.attempt and there.table is not None:
                    keys_there = _keys(there.table)
                    if pc.any(pc.is_in(keys_there, value_set=keys)).as_py():
                        return number, keys_there  # finalizing writes its checksum if the first call did not
                number += 1
                continue
            if not note_checksum(self.output, relative, data, table.num_rows):
                self.check_alone()  # the record is of an older file of this name, or this file was emptied since
                write_checksum(self.output, relative, data, table.num_rows)
            return number, keys

    def rewrite(self, relative: str, table: pa.Table) -> None:
        """Replace a published file; its checksum record is removed first, so that no record is ever wrong.

        Prefer `publish_rows` and `empty`: a delayed write may restore rows that a later attempt removed.
        """
        self.check_alone()
        self.output.remove(checksum_name(relative))
        data = self.format.serialise(table, self.attempt, self.fingerprint)
        self.output.write_recorded(relative, data)
        write_checksum(self.output, relative, data, table.num_rows)


def _keys(table: pa.Table) -> pa.Array:
    """Return a key of every row: its place in the source, and its id, which distinguishes the rows of one sample."""
    columns = [table[name].cast(pa.string()).combine_chunks() for name in KEY_COLUMNS]
    return pc.binary_join_element_wise(*columns, "\n")


def next_number(output: OutputDir, folder: str) -> int:
    """Return the number after the last published file of a folder."""
    numbers = [published_number(name) for name in list_published(output, folder)]
    return max((number + 1 for number in numbers if number is not None), default=0)
