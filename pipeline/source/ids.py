"""Uniqueness of ids: rows whose id an earlier row has, found by hashes first and then by the ids themselves.

Uses 16 bytes per id while it runs.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

Ids = Iterable[tuple[int, str]]
"""(row, id) of the rows that have one, in order."""


def find_repeats(files: Sequence[Callable[[], Ids]]) -> dict[int, list[int]]:
    """By file, the rows whose id an earlier row of this or an earlier file has.

    Each of `files` yields its ids anew; those of files with equal hashes are read a second time.
    """
    hashes, rows, counts = array("q"), array("q"), []
    for ids in files:
        before = len(hashes)
        for row, own_id in ids():
            hashes.append(hash(own_id))
            rows.append(row)
        counts.append(len(hashes) - before)
    suspects = _places_of_repeats(np.frombuffer(hashes, np.int64))
    if not len(suspects):
        return {}
    owners = np.repeat(np.arange(len(files)), counts)[suspects]
    suspected: dict[int, set[int]] = {}
    for file, place in zip(owners.tolist(), suspects.tolist(), strict=True):
        suspected.setdefault(file, set()).add(rows[place])
    seen: set[str] = set()
    found: dict[int, list[int]] = {}
    for file, places in sorted(suspected.items()):
        for row, own_id in files[file]():
            if row not in places:
                continue
            if own_id in seen:
                found.setdefault(file, []).append(row)
            seen.add(own_id)
    return found


def _places_of_repeats(hashes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The places, in order, of all hashes that are there more than once."""
    order = np.argsort(hashes, kind="stable")
    equal = hashes[order][1:] == hashes[order][:-1]
    repeated = np.zeros(len(hashes), bool)
    repeated[1:] |= equal
    repeated[:-1] |= equal
    return np.sort(order[repeated])


def repeated_ids(parts: Iterable[Iterable[str]]) -> list[str]:
    """The ids that are there more than once among all parts, each once; of hashes that meet by chance none."""
    hashes, ids = array("q"), []
    parts = list(parts)
    for part in parts:
        hashes.extend(hash(own_id) for own_id in part)
    suspects = set(_places_of_repeats(np.frombuffer(hashes, np.int64)).tolist())
    if not suspects:
        return []
    place = 0
    for part in parts:
        for own_id in part:
            if place in suspects:
                ids.append(own_id)
            place += 1
    counted = Counter(ids)
    return sorted(own_id for own_id, count in counted.items() if count > 1)
