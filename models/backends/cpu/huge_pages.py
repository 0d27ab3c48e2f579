"""Requests huge pages for packed weights, which are read completely in every step; without support nothing changes."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

PAGE_BYTES = 2 * 1024 * 1024
_HUGEPAGE, _COLLAPSE = 14, 25
"""Values of MADV_HUGEPAGE and MADV_COLLAPSE on Linux."""


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


def advise_huge_pages(address: int, num_bytes: int) -> bool:
    """Move allocated memory to huge pages, except possibly its ends; return whether the kernel did so."""
    madvise = _madvise()
    if madvise is None:
        return False
    first, end = address // PAGE_BYTES, -(-(address + num_bytes) // PAGE_BYTES)
    # The first and last huge page may reach beyond the allocation, or may not be mapped completely.
    for start, stop in ((first, end), (first + 1, end), (first, end - 1), (first + 1, end - 1)):
        page_address, size = start * PAGE_BYTES, (stop - start) * PAGE_BYTES
        if size > 0 and madvise(page_address, size, _HUGEPAGE) == 0 and madvise(page_address, size, _COLLAPSE) == 0:
            return True
    return False
