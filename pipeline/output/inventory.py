"""Inventory of an output: finished samples, damaged or unknown files, and the spool.

Reads only; `pipeline.run.resume` acts on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from pipeline.output.accounts import COLUMNS, Accounts, Rows, locate
from pipeline.output.files import SPOOL, Found, list_published, list_spooled, read_all_found, spool_attempt
from pipeline.source.done_bitmap import Bools, DoneSet, PathIndex
from pipeline.source.manifest import Manifest
from pipeline.source.manifest_parts import counts_of
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir

_ROWS_AT_ONCE = 4_000_000
_FILES_AT_ONCE = 4_096


@dataclass(frozen=True)
class Spooled:
    """A spool file: its rows, but for those whose ids are in `drop`, are still to be published."""

    relative: str
    folder: str
    num_rows: int
    drop: frozenset[str] = frozenset()


@dataclass
class Inventory:
    """What was found. Of published files: rows there twice, and error rows that count no more."""

    accounts: Accounts
    strange: list[Found] = field(default_factory=list)
    spooled: list[Spooled] = field(default_factory=list)
    spent: list[str] = field(default_factory=list)
    """Spool files all of whose rows are there already."""
    doubled: dict[str, list[str]] = field(default_factory=dict)
    superseded: dict[str, Bools] = field(default_factory=dict)
    empty: set[str] = field(default_factory=set)
    """Published files without rows: fences against older attempts, and emptied files."""
    num_rows: dict[str, int] = field(default_factory=lambda: {DATA: 0, ERRORS: 0})
    """Published rows that count."""

    def done(self, retry_errors: bool = False) -> DoneSet:
        """The samples that need nothing more."""
        return self.accounts.done(retry_errors)


def take_inventory(
    output: OutputDir,
    manifest: Manifest,
    rows_per_sample: int | None,
    fingerprints: Mapping[int, str],
    damaged: Mapping[str, str] | None = None,
) -> Inventory:
    """Read every file; `fingerprints` are those of the taken attempts, `damaged` the reasons for damaged published
    files.

    Of published files only the columns that identify rows are read. Spool files have no checksums; they are read
    completely.

    Raises:
        OSError: the store does not answer.
    """
    found = Inventory(Accounts(counts_of(manifest), rows_per_sample))
    paths = PathIndex(manifest.files["path"])

    damaged = damaged or {}

    def enter(names: list[str], act: Callable[[Found, Rows], None], every_page: bool = False) -> None:
        found.strange += [Found(name, problem=damaged[name]) for name in names if name in damaged]
        names = [name for name in names if name not in damaged]
        for batch in _batches(read_all_found(output, names, COLUMNS, every_page)):
            whole = [one for one in batch if not _judge(one, fingerprints, found)]
            for one, rows in zip(whole, locate([one.table for one in whole if one.table is not None], paths)):
                counts = found.accounts.good.counts[rows.files]
                if (rows.files < 0).any() or ((rows.rows >= counts) & (counts >= 0)).any() or (rows.rows < 0).any():
                    problem = "it holds rows of samples that the manifest does not list"
                    found.strange.append(Found(one.relative, problem=problem))
                    continue
                act(one, rows)
                if not rows.table.num_rows:
                    found.empty.add(one.relative)

    def data(one: Found, rows: Rows) -> None:
        repeated = found.accounts.add_good(rows)
        found.num_rows[DATA] += int((~repeated).sum())
        if repeated.any():
            found.doubled[one.relative] = _ids(rows, repeated)

    def errors(one: Found, rows: Rows) -> None:
        repeated = found.accounts.add_bad(rows)
        found.num_rows[ERRORS] += int((~repeated).sum())
        if repeated.any():
            found.superseded[one.relative] = repeated

    def waiting(folder: str) -> Callable[[Found, Rows], None]:
        def act(one: Found, rows: Rows) -> None:
            repeated = found.accounts.add_good(rows) if folder == DATA else found.accounts.add_bad(rows)
            if repeated.all():
                found.spent.append(one.relative)
            else:
                ids = frozenset(_ids(rows, repeated))
                found.spooled.append(Spooled(one.relative, folder, rows.table.num_rows - len(ids), ids))

        return act

    enter(list_published(output, DATA), data)
    enter(list_spooled(output, DATA), waiting(DATA), every_page=True)
    # Newest first: of several errors of one row the last one counts.
    for names, is_published in _errors_newest_first(output):
        enter(names, errors if is_published else waiting(ERRORS), every_page=not is_published)
    known = {*list_spooled(output, DATA), *list_spooled(output, ERRORS)}
    for name in output.list_files(SPOOL):
        if f"{SPOOL}/{name}" not in known:
            found.strange.append(Found(f"{SPOOL}/{name}", problem="it is no spool file by its name"))
    return found


def _errors_newest_first(output: OutputDir) -> list[tuple[list[str], bool]]:
    """Runs of error files, newest first, and whether they are published.

    Files that an attempt published come before those that it or an older one spooled: publishing follows an inventory
    of the spool.
    """
    spooled, published = list_spooled(output, ERRORS)[::-1], list_published(output, ERRORS)[::-1]
    if not spooled:
        return [(published, True)]
    attempts = {one.relative: one.attempt for one in read_all_found(output, published, ())}
    placed = [(-attempts[name], False, name) for name in published]
    placed += [(-spool_attempt(name), True, name) for name in spooled]
    placed.sort(key=lambda one: one[:2])  # stable: within an attempt newest first
    runs = itertools.groupby(placed, lambda one: one[1])
    return [([name for _, _, name in run], not waits) for waits, run in runs]


def _judge(one: Found, fingerprints: Mapping[int, str], found: Inventory) -> bool:
    """Whether a file is none of ours; if so, it is remembered."""
    problem = one.problem
    if not problem and fingerprints.get(one.attempt) != one.fingerprint:
        problem = (
            f"it was made by attempt {one.attempt} of config {one.fingerprint}, which this output has no record of"
        )
    if problem:
        found.strange.append(Found(one.relative, problem=problem))
    return bool(problem)


def _ids(rows: Rows, mask: Bools) -> list[str]:
    return [rows.table["sample_id"][place].as_py() for place in np.flatnonzero(mask).tolist()]


def _batches(found: Iterable[Found]) -> Iterator[list[Found]]:
    """Files in groups whose paths are looked up together."""
    batch: list[Found] = []
    num_rows = 0
    for one in found:
        batch.append(one)
        num_rows += 0 if one.table is None else one.table.num_rows
        if num_rows >= _ROWS_AT_ONCE or len(batch) >= _FILES_AT_ONCE:
            yield batch
            batch, num_rows = [], 0
    if batch:
        yield batch
