"""Verifies published files against the sizes and SHA-256 in `_job/files/`. Changes nothing.

Files without a checksum (the writer was killed before it wrote one) are not verified.
"""

from __future__ import annotations

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pipeline.output.files import NUM_READ_THREADS, checksum_name, list_published
from pipeline.storage import access
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir
from pipeline.storage.retries import retried

PIECE_BYTES = 8 * 1024 * 1024
OTHER_BYTES = "its bytes are not those that were written"


@dataclass(frozen=True)
class Verified:
    """Result of a verification; `num_bytes` were read in `seconds`."""

    sound: frozenset[str] = frozenset()
    problems: dict[str, str] = field(default_factory=dict)
    """Path of a damaged file → the reason."""
    unreadable: tuple[str, ...] = ()
    """Files with a damaged checksum record, which are not verified."""
    num_bytes: int = 0
    seconds: float = 0.0
    by_size: bool = False

    def line(self) -> str:
        """Return the number of files and the cost of the verification as one line of text."""
        num_files = len(self.sound) + len(self.problems)
        if self.by_size:
            return f"verified {num_files:,} files by their sizes alone (--skip-digests)"
        rate = f", {self.num_bytes / 1e6 / self.seconds:,.0f} MB/s" if self.seconds > 0 else ""
        return (
            f"verified {num_files:,} files by SHA-256: {self.num_bytes / 1e6:,.1f} MB in "
            f"{self.seconds:.1f} s{rate}; {len(self.problems):,} damaged"
        )


def verify(output: OutputDir, by_size: bool = False, known: Verified | None = None) -> Verified:
    """Compare published files with their recorded sizes and, unless `by_size`, SHA-256.

    Files that are sound in `known`, an earlier result, are not read again; the cost of `known` is added.
    """
    began_s = time.monotonic()
    known = known or Verified()
    sound = set(known.sound)
    names = [name for name in list_published(output, DATA, ERRORS) if name not in sound]
    with ThreadPoolExecutor(NUM_READ_THREADS) as pool:
        judged = dict(zip(names, pool.map(lambda name: _judge(output, name, by_size), names), strict=True))
    sound |= {name for name, (verdict, _) in judged.items() if verdict == ""}
    unreadable = tuple(name for name, (verdict, _) in judged.items() if verdict == _UNREADABLE)
    problems = {name: verdict for name, (verdict, _) in judged.items() if verdict and verdict != _UNREADABLE}
    num_bytes = known.num_bytes + sum(read for _, read in judged.values())
    seconds = known.seconds + time.monotonic() - began_s
    return Verified(frozenset(sound), problems, unreadable, num_bytes, seconds, by_size)


_UNREADABLE = "its checksum note is damaged"


def _judge(output: OutputDir, relative: str, by_size: bool) -> tuple[str | None, int]:
    """Return the problem of a file (empty for none, None if unknown) and the number of bytes read.

    Another attempt may be replacing the file: if its checksum changes during the comparison, the problem is unknown.
    """
    note = read_note(output, relative)
    if note is None:
        return None, 0
    if not note:
        return _UNREADABLE, 0
    try:
        size = int(retried(lambda: output.filesystem.info(output.path(relative)))["size"])
        problem, num_bytes = "", 0
        if size != note["num_bytes"]:
            torn = "it is torn: " if size < note["num_bytes"] else ""
            problem = f"{torn}it has {size:,} bytes, and {note['num_bytes']:,} were written"
        elif not by_size:
            num_bytes = size
            problem = "" if digest_of(output, relative) == note["sha256"] else OTHER_BYTES
    except FileNotFoundError:
        return None, 0
    if problem and read_note(output, relative) != note:
        return None, num_bytes
    return problem, num_bytes


def read_note(output: OutputDir, relative: str) -> dict[str, Any] | None:
    """Read the checksum record of a file (`sha256`, `num_bytes`, `num_rows`); None if missing, {} if damaged."""
    try:
        note = json.loads(output.read_bytes(checksum_name(relative)))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    is_note = isinstance(note, dict) and isinstance(note.get("sha256"), str) and isinstance(note.get("num_bytes"), int)
    return note if is_note else {}


def digest_of(output: OutputDir, relative: str) -> str:
    """Return the SHA-256 of a file as hex digits; the file is read in pieces of `PIECE_BYTES`."""
    digest = hashlib.sha256()
    with access.open_file(output.filesystem, output.path(relative)) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
