"""Memory on large pages, where the system grants them on request: weights are read from end to end at every step, and
through small pages that takes longer.

A hint and never an error: without support memory stays as it is. Knows addresses; nothing of weights.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

PAGE_BYTES = 2 * 1024 * 1024
_HUGEPAGE, _COLLAPSE = 14, 25
"""Linux's numbers of the advice: use large pages here from now on; and put what is there on them now."""


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


def ask_for_large_pages(address: int, num_bytes: int) -> bool:
    """Ask that memory that is in use lie on large pages; says whether it does, its ends perhaps left out."""
    madvise = _madvise()
    if madvise is None:
        return False
    first, end = address // PAGE_BYTES, -(-(address + num_bytes) // PAGE_BYTES)
    # Pages with the memory's ends hold its neighbours too, which is as good for them; or there is nothing beside it.
    for start, stop in ((first, end), (first + 1, end), (first, end - 1), (first + 1, end - 1)):
        place, size = start * PAGE_BYTES, (stop - start) * PAGE_BYTES
        if size > 0 and madvise(place, size, _HUGEPAGE) == 0 and madvise(place, size, _COLLAPSE) == 0:
            return True
    return False
