"""Takes the inventory of an output: finished samples, damaged or unknown files, and spool files. Changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from pipeline.output.accounts import COLUMNS, Accounts, Rows, locate
from pipeline.output.files import SPOOL, Found, list_published, list_spooled, read_all_found, spool_attempt
from pipeline.source.done_bitmap import Bools, Ints, PathIndex
from pipeline.source.manifest import Manifest
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir

_ROWS_AT_ONCE = 4_000_000
_FILES_AT_ONCE = 4_096


@dataclass(frozen=True)
class Spooled:
    """A spool file with `num_rows` rows to publish; `drop` are the ids of its other rows (repeated or superseded)."""

    relative: str
    folder: str
    num_rows: int
    drop: frozenset[str] = frozenset()


@dataclass
class Inventory:
    """The state of an output: `strange` files are damaged or unknown, `spooled` files hold rows to publish; by file,
    `doubled` lists ids of repeated rows, and `superseded` masks error rows with a result or a newer error."""

    accounts: Accounts
    strange: list[Found] = field(default_factory=list)
    spooled: list[Spooled] = field(default_factory=list)
    spent: list[str] = field(default_factory=list)
    """Spool files whose rows are all published."""
    doubled: dict[str, list[str]] = field(default_factory=dict)
    superseded: dict[str, Bools] = field(default_factory=dict)
    empty: set[str] = field(default_factory=set)
    """Published files without rows: fences against older attempts, and files that were emptied."""
    num_rows: dict[str, int] = field(default_factory=lambda: {DATA: 0, ERRORS: 0})
    """Published rows by folder, without repeated and superseded rows."""


def take_inventory(
    output: OutputDir,
    manifest: Manifest,
    rows_per_sample: int | None,
    fingerprints: Mapping[int, str],
    damaged: Mapping[str, str] | None = None,
) -> Inventory:
    """Read every file of an output and return its inventory.

    `fingerprints` are the config fingerprints of all attempts, `damaged` the problems of damaged published files by
    path. Only the identifying columns of published files are read; spool files have no checksums and are read whole.
    """
    found = Inventory(Accounts(manifest.counts, rows_per_sample))
    paths = PathIndex(manifest.files["path"])
    damaged = damaged or {}

    def enter(names: list[str], folder: str, is_published: bool) -> None:
        found.strange += [Found(name, problem=damaged[name]) for name in names if name in damaged]
        names = [name for name in names if name not in damaged]
        for batch in _batches(read_all_found(output, names, COLUMNS, whole=not is_published)):
            files = [one for one in batch if not _is_strange(one, fingerprints, found)]
            parts = locate([one.table for one in files], paths)
            known = [_are_listed(rows, found.accounts.good.counts) for rows in parts]
            problem = "it holds rows of samples that the manifest does not list"
            found.strange += [Found(one.relative, problem=problem) for one, is_ok in zip(files, known) if not is_ok]
            files, parts = list(itertools.compress(files, known)), list(itertools.compress(parts, known))
            if files:
                masks = found.accounts.add(parts, is_error=folder == ERRORS)
                for one, rows, repeated in zip(files, parts, masks, strict=True):
                    (published if is_published else waiting)(one.relative, folder, rows, repeated)

    def published(relative: str, folder: str, rows: Rows, repeated: Bools) -> None:
        found.num_rows[folder] += int((~repeated).sum())
        if not len(repeated):
            found.empty.add(relative)
        if repeated.any() and folder == DATA:
            found.doubled[relative] = _ids(rows, repeated)
        elif repeated.any():
            found.superseded[relative] = repeated

    def waiting(relative: str, folder: str, rows: Rows, repeated: Bools) -> None:
        if repeated.all():
            found.spent.append(relative)
        else:
            ids = frozenset(_ids(rows, repeated))
            found.spooled.append(Spooled(relative, folder, len(repeated) - len(ids), ids))

    enter(list_published(output, DATA), DATA, is_published=True)
    enter(list_spooled(output, DATA), DATA, is_published=False)
    # Newest first, because the newest of several errors of one row counts.
    for names, is_published in _errors_newest_first(output):
        enter(names, ERRORS, is_published)
    known = {*list_spooled(output, DATA), *list_spooled(output, ERRORS)}
    unknown = [name for name in (f"{SPOOL}/{name}" for name in output.list_files(SPOOL)) if name not in known]
    found.strange += [Found(name, problem="it is no spool file by its name") for name in unknown]
    return found


def _errors_newest_first(output: OutputDir) -> list[tuple[list[str], bool]]:
    """Group error files into runs, newest first, as pairs of paths and whether they are published.

    Files that an attempt published come before files that the same or an older attempt spooled.
    """
    spooled, published = list_spooled(output, ERRORS)[::-1], list_published(output, ERRORS)[::-1]
    if not spooled:
        return [(published, True)]
    attempts = {one.relative: one.attempt for one in read_all_found(output, published, ())}
    placed = [(-attempts[name], False, name) for name in published]
    placed += [(-spool_attempt(name), True, name) for name in spooled]
    placed.sort(key=lambda one: one[:2])  # stable sort: within an attempt, newest first
    runs = itertools.groupby(placed, lambda one: one[1])
    return [([name for _, _, name in run], not waits) for waits, run in runs]


def _is_strange(one: Found, fingerprints: Mapping[int, str], found: Inventory) -> bool:
    """Return whether a file is damaged or not of a known attempt; if so, add it to the strange files."""
    problem = one.problem
    if not problem and fingerprints.get(one.attempt) != one.fingerprint:
        problem = (
            f"it was made by attempt {one.attempt} of config {one.fingerprint}, which this output has no record of"
        )
    if problem:
        found.strange.append(Found(one.relative, problem=problem))
    return bool(problem)


def _are_listed(rows: Rows, counts: Ints) -> bool:
    limits = counts[rows.files]
    return not ((rows.files < 0) | (rows.rows < 0) | ((rows.rows >= limits) & (limits >= 0))).any()


def _ids(rows: Rows, mask: Bools) -> list[str]:
    found: list[str] = rows.table["sample_id"].filter(pa.array(mask)).to_pylist()
    return found


def _batches(found: Iterable[Found]) -> Iterator[list[Found]]:
    """Group files into batches, whose source paths are looked up together."""
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
