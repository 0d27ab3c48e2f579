"""How a drafter runs what it has missed while nothing was drafted: whose, in how many forwards, and how wide.

Everything follows from host numbers that are known before the step. Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.lanes import SlotBatch

NARROWEST = 2
"""Least tokens of a catch-up forward: what a step with drafts may leave to be run."""
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


def some_of(slots: SlotBatch, wanted: Sequence[bool]) -> SlotBatch | None:
    """The slots of a batch that are `wanted`, as a batch; None where there are none."""
    if all(wanted):
        return slots
    places = [place for place, is_wanted in enumerate(wanted) if is_wanted]
    if not places:
        return None
    return SlotBatch(
        slots.index[torch.tensor(places, device=slots.index.device)],
        tuple(slots.ids[place] for place in places),
        tuple(slots.num_generated[place] for place in places),
    )
