"""Plans the forwards in which a drafter runs the tokens that were generated while drafting was paused."""

from __future__ import annotations

NARROWEST = 2
"""Minimum tokens per row of a catch-up forward: the maximum that a step with drafts leaves to run."""
WIDEST = 128
"""Maximum tokens per row of a catch-up forward; more are not faster, and the mask grows quadratically."""


def catch_up_widths(most_tokens: int) -> list[tuple[int, int]]:
    """Return (start, width) of each forward that runs up to `most_tokens` tokens per row; one forward up to `WIDEST`.

    Widths are powers of two, so that few different shapes occur.
    """
    parts = [(start, WIDEST) for start in range(0, most_tokens - WIDEST, WIDEST)]
    start = len(parts) * WIDEST
    width = max(NARROWEST, 1 << (most_tokens - start - 1).bit_length()) if most_tokens > start else NARROWEST
    return [*parts, (start, width)]
