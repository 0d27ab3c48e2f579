"""Finds the lines of a block of bytes; consecutive blank lines are one range, because they may be most of a file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_IS_SPACE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))


def line_ranges(
    content: NDArray[np.uint8], ends: NDArray[np.intp], max_bytes: int, cut: int | None
) -> Iterator[tuple[int, int, int]]:
    """Yield first byte, byte behind the line feed, and number of the lines between the line feeds `ends`; consecutive
    blank lines of at most `max_bytes` are one range, but none before byte `cut` with one behind it."""
    starts, stops = ends[:-1] + 1, ends[1:] + 1
    cut_line = len(starts) if cut is None else int(np.searchsorted(starts, cut))
    is_one_range = cut_line in (0, len(starts)) and 0 < ends[-1] - ends[0] <= max_bytes
    if is_one_range and content[starts[0] : stops[-1]].tobytes().isspace():
        yield int(starts[0]), int(stops[-1]), len(starts)
        return
    firsts = np.arange(len(starts))
    if np.count_nonzero(_IS_SPACE[content[starts]]) > 1:
        num_other = np.cumsum(~_IS_SPACE[content], dtype=np.int32)
        is_blank = (num_other[stops - 1] == num_other[starts - 1]) & (stops - starts <= max_bytes)
        is_first = ~(is_blank & np.append(False, is_blank[:-1]))
        is_first[cut_line : cut_line + 1] = True
        firsts = np.flatnonzero(is_first)
    counts = np.diff(firsts, append=len(starts))
    yield from zip(starts[firsts].tolist(), stops[firsts + counts - 1].tolist(), counts.tolist(), strict=True)
