"""Verifies published files against their recorded digests and the checksum notes in `_job/files/`. Changes nothing.

A file is sound if its digest is recorded (`pipeline.storage.digests`); its note may be missing or outdated, if a writer
was killed before it wrote it. Outputs of older versions have no records: then the note must be right.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from configs.load import ConfigError
from files.plurals import counted
from pipeline.output.files import NUM_READ_THREADS, checksum_name, list_published, shard_of
from pipeline.storage import access
from pipeline.storage.damage import NO_FILE_ERRNOS, DamagedFile
from pipeline.storage.digests import OTHER_BYTES, Digest
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir
from pipeline.storage.retries import retried
from pipeline.storage.shard import MAX_SHARDS, Shard

PIECE_BYTES = 8 * 1024 * 1024
NO_NOTE = "no checksum was noted of it"
DAMAGED_NOTE = "its checksum note is damaged, and its digest is not recorded"


@dataclass(frozen=True)
class Verified:
    """Result of a verification; `num_bytes` were read in `seconds`."""

    sound: frozenset[str] = frozenset()
    problems: dict[str, str] = field(default_factory=dict)
    """Path of a damaged file → the reason."""
    unrecorded: dict[str, str] = field(default_factory=dict)
    """Path of a file whose bytes nothing vouches for → the reason."""
    unreadable: tuple[str, ...] = ()
    """Sound files whose checksum note is damaged, or is not that of the file."""
    unnoted: tuple[str, ...] = ()
    """Sound files without a checksum note."""
    num_bytes: int = 0
    seconds: float = 0.0
    by_size: bool = False

    def line(self) -> str:
        """Return the number of files and the cost of the verification as one line of text."""
        num_files = len(self.sound) + len(self.problems)
        if self.by_size:
            return f"verified {counted(num_files, 'file')} by their sizes alone (--skip-digests)"
        rate = f", {self.num_bytes / 1e6 / self.seconds:,.0f} MB/s" if self.seconds > 0 else ""
        return (
            f"verified {counted(num_files, 'file')} by SHA-256: {self.num_bytes / 1e6:,.1f} MB in "
            f"{self.seconds:.1f} s{rate}; {len(self.problems):,} damaged"
        )


@dataclass(frozen=True)
class _Judged:
    """The `problem` of a file (None if another attempt replaces it right now), whether it has a digest or note, the
    state of its note, and the number of bytes read."""

    problem: str | None = ""
    is_recorded: bool = True
    has_note: bool = True
    is_note_right: bool = True
    num_bytes: int = 0


def verify(
    output: OutputDir, by_size: bool = False, known: Verified | None = None, is_tolerant: bool = False
) -> Verified:
    """Compare published files with their digests, or `by_size` with their sizes only.

    Files that are sound in `known`, an earlier result, are not read again; the cost of `known` is added. A local file
    that cannot be read is damaged if the check `is_tolerant`, and a ConfigError if not.
    """
    began_s = time.monotonic()
    known = known or Verified()
    names = [name for name in list_published(output, DATA, ERRORS) if name not in known.sound]
    recorded = output.digests()  # after the listing: a file is created after its record
    with ThreadPoolExecutor(NUM_READ_THREADS) as pool:
        judge = partial(_judged, output, recorded, by_size, is_tolerant)
        judged = dict(zip(names, pool.map(judge, names), strict=True))
    sound = {name: result for name, result in judged.items() if result.problem == ""}
    return Verified(
        known.sound | sound.keys(),
        {name: result.problem for name, result in judged.items() if result.problem and result.is_recorded},
        {name: result.problem for name, result in judged.items() if result.problem and not result.is_recorded},
        (*known.unreadable, *(name for name, result in sound.items() if result.has_note and not result.is_note_right)),
        (*known.unnoted, *(name for name, result in sound.items() if not result.has_note)),
        known.num_bytes + sum(result.num_bytes for result in judged.values()),
        known.seconds + time.monotonic() - began_s,
        by_size,
    )


def problem_of(output: OutputDir, name: str) -> str:
    """Return the problem of a published file, by its path in the whole output; empty for none."""
    if (shard := shard_of(name)) is not None:
        output = replace(output, shard=Shard(shard, MAX_SHARDS))
        name = name.replace(output.prefix, "", 1)
    return _judge(output, name, _recorded(output, name), False).problem or ""


def _judged(
    output: OutputDir, recorded: Mapping[str, frozenset[Digest]], by_size: bool, is_tolerant: bool, relative: str
) -> _Judged:
    try:
        return _judge(output, relative, recorded.get(relative, frozenset()), by_size)
    except OSError as error:
        if not output.is_local:
            raise
        reason = f"it cannot be read: {access.reason_of(error)}"
        if is_tolerant:
            return _Judged(reason)
        raise ConfigError(f"sink.path: {output.shown(relative)}: {reason}") from None


def _recorded(output: OutputDir, relative: str) -> frozenset[Digest]:
    return output.digests(relative.partition("/")[0]).get(relative, frozenset())


def _judge(output: OutputDir, relative: str, recorded: frozenset[Digest], by_size: bool) -> _Judged:
    """Compare a file with its recorded digests, or else with its note.

    Another attempt may be replacing the file: if its records change during the comparison, the problem is unknown.
    """
    note = read_note(output, relative)
    noted = _digest_in(note)
    expected = recorded or frozenset(() if noted is None else (noted,))
    if not expected:
        return _Judged(NO_NOTE if note is None else DAMAGED_NOTE, is_recorded=False)
    try:
        size = int(retried(lambda: output.filesystem.info(output.path(relative)))["size"])
        digest = Digest(size, "" if by_size or size not in {digest.num_bytes for digest in expected} else "?")
        if digest.sha256:
            digest = Digest(size, digest_of(output, relative))
    except FileNotFoundError:
        return _Judged(None)
    except OSError as error:
        if error.errno not in NO_FILE_ERRNOS:
            raise
        return _Judged(access.reason_of(error))
    problem = _problem(digest, expected, by_size)
    num_bytes = size if digest.sha256 else 0
    if problem and (read_note(output, relative) != note or digest in _recorded(output, relative)):
        return _Judged(None, num_bytes=num_bytes)
    is_right = noted is not None and (noted == digest or (by_size and noted.num_bytes == size))
    return _Judged(problem, True, note is not None, is_right, num_bytes)


def _problem(digest: Digest, expected: frozenset[Digest], by_size: bool) -> str:
    sizes = sorted(digest.num_bytes for digest in expected)
    if digest.num_bytes not in sizes:
        torn = "it is torn: " if digest.num_bytes < sizes[-1] else ""
        return f"{torn}it has {digest.num_bytes:,} bytes, and {sizes[-1]:,} were written"
    return "" if by_size or digest in expected else OTHER_BYTES


def read_note(output: OutputDir, relative: str) -> dict[str, Any] | None:
    """Read the checksum note of a file (`sha256`, `num_bytes`, `num_rows`); None if missing, {} if damaged."""
    try:
        note = output.read_json(checksum_name(relative))
    except FileNotFoundError:
        return None
    except DamagedFile:
        return {}
    return note if isinstance(note, dict) else {}


def is_of(note: dict[str, Any], data: Any) -> bool:
    """Return whether a checksum note is that of these bytes."""
    return _digest_in(note) == Digest.of(data)


def _digest_in(note: dict[str, Any] | None) -> Digest | None:
    """Return the digest that a note has; None if it has none."""
    sha256, num_bytes = (note or {}).get("sha256"), (note or {}).get("num_bytes")
    return Digest(num_bytes, sha256) if isinstance(sha256, str) and type(num_bytes) is int else None


def is_one_of(output: OutputDir, relative: str, digests: Collection[Digest]) -> bool:
    """Return whether a file has one of these digests; it is read only if its size is that of one."""
    size = int(retried(lambda: output.filesystem.info(output.path(relative)))["size"])
    hashes = {digest.sha256 for digest in digests if digest.num_bytes == size}
    return bool(hashes) and digest_of(output, relative) in hashes


def digest_of(output: OutputDir, relative: str) -> str:
    """Return the SHA-256 of a file as hex digits; the file is read in pieces of `PIECE_BYTES`."""
    digest = hashlib.sha256()
    with access.open_file(output.filesystem, output.path(relative)) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
