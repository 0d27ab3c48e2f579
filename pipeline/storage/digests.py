"""Names the records of digests: empty files whose names have the size and SHA-256 of a file of the output.

    _job/digests/data/part-000003.parquet-48211-9f86d0…    a version of data/part-000003.parquet
    _job/digests/manifest/part-00000.parquet-5120-2c2642…  a version of _job/manifest/part-00000.parquet

A record is created before its file, and never changed. A file may have several: it was replaced, or several processes
created it at the same time. One listing returns all records of a folder, and their content has no meaning.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

DIGESTS = "_job/digests"
OTHER_BYTES = "its bytes are not those that were written"
_RECORD = re.compile(r"(.+)-(\d{1,15})-([0-9a-f]{64})", re.DOTALL)


class Digest(NamedTuple):
    """The size and SHA-256 (hex digits) of a file's content."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, data: Any) -> Self:
        """Return the digest of an object with the buffer protocol."""
        view = memoryview(data)
        return cls(view.nbytes, hashlib.sha256(view).hexdigest())


def digest_name(relative: str, digest: Digest) -> str:
    """Return the path of the record of a version of a file."""
    return f"{DIGESTS}/{relative.removeprefix('_job/')}-{digest.num_bytes}-{digest.sha256}"


def parse_digests(names: Iterable[str]) -> dict[str, frozenset[Digest]]:
    """Return the recorded versions of every file, by its path without `_job/`, from names below `DIGESTS`."""
    by_path: dict[str, set[Digest]] = {}
    for name in names:
        if match := _RECORD.fullmatch(name):
            by_path.setdefault(match[1], set()).add(Digest(int(match[2]), match[3]))
    return {relative: frozenset(digests) for relative, digests in by_path.items()}
