"""Takes the inventory of an output: finished samples, damaged or unknown files, and spool files. Changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from pipeline.cluster.partitions import IN_PROCESS, Workers
from pipeline.manifest.done_bitmap import Bools, PathIndex
from pipeline.manifest.manifest import Manifest
from pipeline.output.accounts import COLUMNS, Accounts, Rows, locate
from pipeline.output.checksums import is_one_of
from pipeline.output.files import SPOOL, Found, list_published, list_spooled, read_all_found, spool_attempt
from pipeline.output.shard_samples import ShardSamples
from pipeline.storage import access
from pipeline.storage.damage import NO_FILE_ERRNOS
from pipeline.storage.digests import OTHER_BYTES
from pipeline.storage.output_dir import DATA, ERRORS, JOB, OutputDir

_ROWS_AT_ONCE = 4_000_000
_FILES_AT_ONCE = 4_096


@dataclass(frozen=True)
class Spooled:
    """A spool file with `num_rows` rows to publish; its other rows are repeated or superseded: `drop` are their ids,
    and `dropped` their indices in the file."""

    relative: str
    folder: str
    num_rows: int
    drop: frozenset[str] = frozenset()
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class ErrorFile:
    """A published file of `errors/` that was read: its `version` (`OutputDir.list_versions`), attempt, and rows."""

    version: str
    attempt: int
    rows: Rows


@dataclass(frozen=True)
class Reads:
    """Everything that an inventory has read of published files, for the next inventory of the same attempt.

    Published files do not change, except that they may be set aside, emptied or rewritten; then their version changes.
    Files with a problem are not in it, so they are read again.
    """

    paths: pa.ChunkedArray
    """Paths of the manifest, to whose ordinals the rows refer."""
    results: Accounts
    """Rows of the files in `data`, without error rows."""
    data: dict[str, str]
    """Versions of files of `data/`."""
    errors: dict[str, ErrorFile]


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
    reads: Reads | None = None
    """None if the version of some file of `data/` is unknown; then the next inventory reads all files."""
    num_files_read: int = 0
    """Number of published files that were read and not known from an earlier inventory."""


def take_inventory(
    output: OutputDir,
    manifest: Manifest,
    rows_per_sample: int | None,
    fingerprints: Mapping[int, str | None],
    damaged: Mapping[str, str] | None = None,
    known: Inventory | None = None,
    workers: Workers = IN_PROCESS,
    unrecorded: Mapping[str, str] | None = None,
) -> Inventory:
    """Read the files of an output and return its inventory.

    `fingerprints` are the config fingerprints of all attempts (None: unknown), `damaged` the problems of damaged
    published files by path, which are not opened, and `unrecorded` those of files without a digest or checksum note.
    Only the identifying columns of published files are read; spool files are read whole. Published files that the
    inventory `known` has read, and whose versions are the same, are not read again.
    """
    taker = _Taker(output, manifest, rows_per_sample, fingerprints, damaged or {}, known, workers, unrecorded or {})
    return taker.take()


class _Taker:
    def __init__(
        self,
        output: OutputDir,
        manifest: Manifest,
        rows_per_sample: int | None,
        fingerprints: Mapping[int, str | None],
        damaged: Mapping[str, str],
        known: Inventory | None,
        workers: Workers,
        unrecorded: Mapping[str, str],
    ) -> None:
        self.output, self.fingerprints, self.damaged, self.workers = output, fingerprints, damaged, workers
        self.unrecorded = unrecorded
        self.samples = ShardSamples(manifest, output.shard.number)
        paths = manifest.files["path"]
        self.paths = PathIndex(paths)
        # Listed before any file is read: a file that changes in between has another version in the next inventory.
        versions = {
            f"{folder}/{name}": version
            for folder in (DATA, ERRORS)
            for name, version in output.list_versions(folder).items()
        }
        self.versions = versions
        self.is_known = True
        known_reads = None if known is None else _kept(known, manifest, versions, damaged, self.samples)
        if known_reads is None or known is None:
            self.inventory = Inventory(Accounts(manifest.counts, rows_per_sample))
            self.reads = Reads(paths, self.inventory.accounts, {}, {})
        else:
            self.inventory = Inventory(known_reads.results, doubled=dict(known.doubled))
            self.inventory.num_rows[DATA] = known.num_rows[DATA]
            self.inventory.empty = {name for name in known.empty if name in known_reads.data}
            self.reads = known_reads

    def take(self) -> Inventory:
        inventory, output = self.inventory, self.output
        self._enter([name for name in list_published(output, DATA) if name not in self.reads.data], DATA, True)
        counts = inventory.accounts.good.counts
        self.reads = replace(self.reads, results=inventory.accounts.with_counts(counts))
        self._enter(list_spooled(output, DATA), DATA, is_published=False)
        # Newest first, because the newest of several errors of one row counts.
        for names, is_published in self._errors_newest_first():
            self._enter(names, ERRORS, is_published)
        known = {*list_spooled(output, DATA), *list_spooled(output, ERRORS)}
        unknown = [name for name in (f"{SPOOL}/{name}" for name in output.list_files(SPOOL)) if name not in known]
        inventory.strange += [Found(name, problem="it is no spool file by its name") for name in unknown]
        inventory.reads = self.reads if self.is_known else None
        return inventory

    def _enter(self, names: list[str], folder: str, is_published: bool) -> None:
        inventory = self.inventory
        damaged = self.damaged if is_published else spool_problems(self.output, names)
        inventory.strange += [Found(name, problem=damaged[name]) for name in names if name in damaged]
        names = [name for name in names if name not in damaged]
        for batch in _batches(self._files(names, is_published)):
            files = self._located(batch, folder, is_published)
            if files:
                masks = inventory.accounts.add([rows for _, rows in files], is_error=folder == ERRORS)
                for (relative, rows), repeated in zip(files, masks, strict=True):
                    (self._published if is_published else self._waiting)(relative, folder, rows, repeated)

    def _files(self, names: list[str], is_published: bool) -> Iterator[Found | str]:
        """Yield the files in order; those of `errors/` that are known by their names, and the others as read."""
        known = self.reads.errors if is_published else {}
        unknown = [name for name in names if name not in known]
        fresh = iter(read_all_found(self.output, unknown, COLUMNS, not is_published, self.workers))
        for name in names:
            yield name if name in known else next(fresh)

    def _located(self, batch: list[Found | str], folder: str, is_published: bool) -> list[tuple[str, Rows]]:
        """Return the files of a batch without problems and their rows, with one lookup of paths."""
        inventory = self.inventory
        fresh = [file for file in batch if not isinstance(file, str) and not self._is_strange(file)]
        located = dict(
            zip([file.relative for file in fresh], locate([file.table for file in fresh], self.paths), strict=True)
        )
        for file in fresh:
            rows = located[file.relative]
            if problem := self.samples.problem(rows):
                inventory.strange.append(Found(file.relative, problem=problem))
                del located[file.relative]
            elif is_published:
                self._note(file, rows, folder)
        located |= {name: self.reads.errors[name].rows for name in batch if isinstance(name, str)}
        names = [file if isinstance(file, str) else file.relative for file in batch]
        return [(name, located[name]) for name in names if name in located]

    def _is_strange(self, file: Found) -> bool:
        """Return whether a file is damaged or not of a known attempt; if so, add it to the strange files."""
        problem = problem_of(file, self.fingerprints) or self.unrecorded.get(file.relative, "")
        if problem:
            self.inventory.strange.append(Found(file.relative, problem=problem))
        return bool(problem)

    def _note(self, file: Found, rows: Rows, folder: str) -> None:
        self.inventory.num_files_read += 1
        version = self.versions.get(file.relative, "")
        if folder == DATA:
            self.reads.data[file.relative] = version
            # A file that was created after the listing of versions, or of a store without versions: it cannot be
            # recognised in the next inventory, and the rows counted here must not be counted again.
            self.is_known &= bool(version)
        elif version:
            needed = [name for name in rows.table.column_names if name != "source"] if self._needs_columns else []
            compact = Rows(rows.files, rows.rows, rows.table.select(needed))
            self.reads.errors[file.relative] = ErrorFile(version, file.attempt, compact)

    @property
    def _needs_columns(self) -> bool:
        return self.inventory.accounts.rows_per_sample != 1

    def _published(self, relative: str, folder: str, rows: Rows, repeated: Bools) -> None:
        inventory = self.inventory
        inventory.num_rows[folder] += int((~repeated).sum())
        if not len(repeated):
            inventory.empty.add(relative)
        if repeated.any() and folder == DATA:
            inventory.doubled[relative] = _ids(rows, repeated)
        elif repeated.any():
            inventory.superseded[relative] = repeated

    def _waiting(self, relative: str, folder: str, rows: Rows, repeated: Bools) -> None:
        if repeated.all():
            self.inventory.spent.append(relative)
        else:
            indices = tuple(np.flatnonzero(repeated).tolist())
            ids = frozenset(_ids(rows, repeated))
            self.inventory.spooled.append(Spooled(relative, folder, len(repeated) - len(indices), ids, indices))

    def _errors_newest_first(self) -> list[tuple[list[str], bool]]:
        """Group error files into runs, newest first, as pairs of paths and whether they are published.

        Files that an attempt published come before files that the same or an older attempt spooled.
        """
        spooled, published = list_spooled(self.output, ERRORS)[::-1], list_published(self.output, ERRORS)[::-1]
        if not spooled:
            return [(published, True)]
        attempts = {name: file.attempt for name, file in self.reads.errors.items()}
        unknown = [name for name in published if name not in attempts]
        attempts |= {file.relative: file.attempt for file in read_all_found(self.output, unknown, ())}
        placed = [(-attempts[name], False, name) for name in published]
        placed += [(-spool_attempt(name), True, name) for name in spooled]
        placed.sort(key=lambda entry: entry[:2])  # stable sort: within an attempt, newest first
        runs = itertools.groupby(placed, lambda entry: entry[1])
        return [([name for _, _, name in run], not waits) for waits, run in runs]


def _kept(
    known: Inventory, manifest: Manifest, versions: Mapping[str, str], damaged: Mapping[str, str], samples: ShardSamples
) -> Reads | None:
    """Return what is still valid of the files that an earlier inventory has read; None if all must be read again.

    Rows cannot be removed from the counted results. So all files are read again if a file of `data/` was replaced or is
    damaged, if the manifest has other files at the same ordinals, or if a count contradicts the rows.
    """
    reads = known.reads
    if reads is None:
        return None
    paths = manifest.files["path"]
    if not paths.slice(0, len(reads.paths)).equals(reads.paths):
        return None
    if any(versions.get(name) != version or name in damaged for name, version in reads.data.items()):
        return None
    errors = {
        name: file
        for name, file in reads.errors.items()
        if versions.get(name) == file.version and name not in damaged and not samples.problem(file.rows)
    }
    try:
        return Reads(paths, reads.results.with_counts(manifest.counts), dict(reads.data), errors)
    except ValueError:
        return None


def problem_of(file: Found, fingerprints: Mapping[int, str | None]) -> str:
    """Return why a file is damaged, or not of a known attempt; empty if it is sound."""
    if file.problem or fingerprints.get(file.attempt, "") in (None, file.fingerprint):
        return file.problem
    return f"it was made by attempt {file.attempt} of config {file.fingerprint}, which this output has no record of"


def spool_problems(output: OutputDir, names: Sequence[str]) -> dict[str, str]:
    """Return the problems of these spool files: no regular file, or bytes of none of the recorded digests."""
    recorded = output.digests(SPOOL) if names else {}
    problems = {}
    for name in names:
        digests = recorded.get(name.removeprefix(f"{JOB}/"), frozenset())
        try:
            if digests and not is_one_of(output, name, digests):
                problems[name] = OTHER_BYTES
        except FileNotFoundError:  # reading it finds that it is gone
            continue
        except OSError as error:
            if error.errno not in NO_FILE_ERRNOS:
                raise
            problems[name] = access.reason_of(error)
    return problems


def _ids(rows: Rows, mask: Bools) -> list[str]:
    ids: list[str] = rows.table["sample_id"].filter(pa.array(mask)).to_pylist()
    return ids


def _batches(files: Iterable[Found | str]) -> Iterator[list[Found | str]]:
    """Group files into batches, whose source paths are looked up together."""
    batch: list[Found | str] = []
    num_rows = 0
    for file in files:
        batch.append(file)
        num_rows += 0 if isinstance(file, str) or file.table is None else file.table.num_rows
        if num_rows >= _ROWS_AT_ONCE or len(batch) >= _FILES_AT_ONCE:
            yield batch
            batch, num_rows = [], 0
    if batch:
        yield batch
