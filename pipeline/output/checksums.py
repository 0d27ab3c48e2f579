"""Whether published files still hold the bytes that were written: sizes and SHA-256 against `_job/files/`.

Reads every published byte once, in pieces and several files at a time; changes nothing. Files whose checksum was not
noted (the writer was killed in between) cannot be judged.
"""

from __future__ import annotations

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.output.files import NUM_READ_THREADS, checksum_name, list_published
from pipeline.storage import access
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir
from pipeline.storage.retries import retried

PIECE_BYTES = 8 * 1024 * 1024
OTHER_BYTES = "its bytes are not those that were written"


@dataclass(frozen=True)
class Verified:
    """Result of verification, and its cost: `num_bytes` were read in `seconds`."""

    sound: frozenset[str] = frozenset()
    problems: dict[str, str] = field(default_factory=dict)
    """Path of a damaged file → the reason."""
    unreadable: tuple[str, ...] = ()
    """Files whose checksum note is damaged itself; they cannot be judged."""
    num_bytes: int = 0
    seconds: float = 0.0
    by_size: bool = False

    def line(self) -> str:
        """The cost in words."""
        num_files = len(self.sound) + len(self.problems)
        if self.by_size:
            return f"verified {num_files:,} files by their sizes alone (--skip-digests)"
        rate = f", {self.num_bytes / 1e6 / self.seconds:,.0f} MB/s" if self.seconds > 0 else ""
        return (
            f"verified {num_files:,} files by SHA-256: {self.num_bytes / 1e6:,.1f} MB in "
            f"{self.seconds:.1f} s{rate}; {len(self.problems):,} damaged"
        )


def verify(output: OutputDir, by_size: bool = False, known: Verified | None = None) -> Verified:
    """Compare published files with their noted sizes and, unless `by_size`, SHA-256; those that are `known` to be sound
    are not read again.

    Raises:
        OSError: the store does not answer.
    """
    began_s = time.monotonic()
    sound = set() if known is None else set(known.sound)
    names = [name for folder in (DATA, ERRORS) for name in list_published(output, folder) if name not in sound]
    problems, unreadable, num_bytes = {}, [], 0
    with ThreadPoolExecutor(NUM_READ_THREADS) as pool:
        for name, (verdict, read) in zip(names, pool.map(lambda one: _judge(output, one, by_size), names), strict=True):
            num_bytes += read
            if verdict == _UNREADABLE:
                unreadable.append(name)
            elif verdict:
                problems[name] = verdict
            elif verdict is not None:
                sound.add(name)
    spent_s = time.monotonic() - began_s
    found = Verified(frozenset(sound), problems, tuple(unreadable), num_bytes, spent_s, by_size)
    if known is None:
        return found
    return replace(found, num_bytes=found.num_bytes + known.num_bytes, seconds=found.seconds + known.seconds)


_UNREADABLE = "its checksum note is damaged"


def _judge(output: OutputDir, relative: str, by_size: bool) -> tuple[str | None, int]:
    """Damage of a file (none: empty; unknown: None), and how many bytes were read of it.

    Another attempt may be replacing the file: a checksum that has changed meanwhile does not belong to these bytes.
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
    """What was noted of a published file: `sha256`, `num_bytes`, `num_rows`; None without a note, empty where it is
    damaged."""
    try:
        note = json.loads(output.read_bytes(checksum_name(relative)))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    is_note = isinstance(note, dict) and isinstance(note.get("sha256"), str) and isinstance(note.get("num_bytes"), int)
    return note if is_note else {}


def digest_of(output: OutputDir, relative: str) -> str:
    """The SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with access.open_file(output.filesystem, output.path(relative)) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
