"""Widths of the forwards that catch up on tokens which a drafter missed while drafting was paused."""

from __future__ import annotations

NARROWEST = 2
"""Minimum tokens of a catch-up forward: the most that a step with drafts may leave to run."""
WIDEST = 128
"""Most tokens of a catch-up forward: more of them would not run faster, and their mask grows with the square."""


def catch_up_widths(most_tokens: int) -> list[tuple[int, int]]:
    """Start and width of each forward that runs up to `most_tokens` tokens of a row: one, up to `WIDEST` tokens.

    Widths are powers of two, so that few different shapes occur.
    """
    parts = [(start, WIDEST) for start in range(0, most_tokens - WIDEST, WIDEST)]
    start = len(parts) * WIDEST
    width = max(NARROWEST, 1 << (most_tokens - start - 1).bit_length()) if most_tokens > start else NARROWEST
    return [*parts, (start, width)]
