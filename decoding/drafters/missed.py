"""Buffers features of tokens that were generated without drafts, until the drafter encodes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.drafters.model import WIDEST, catch_up_widths
from models.kv.lanes import SlotBatch


class MissedFeatures:
    """Up to P features (D,) per slot; `most_tokens` is the most tokens that a slot can miss.

    State per slot: `_features` (S, P, D), `_count` (S,), with the upper bound `_most` on the host.
    """

    def __init__(self, num_slots: int, most_tokens: int, like: Tensor, size: int) -> None:
        # At least one, because the last step of a batch also has no drafts.
        self.limit = min(WIDEST, 1 + most_tokens)
        ((_, self.width),) = catch_up_widths(self.limit)
        self._features = like.new_zeros(num_slots, self.width, size)
        self._count = torch.zeros(num_slots, dtype=torch.long, device=like.device)
        self._most = [0] * num_slots

    def clear(self, slots: SlotBatch) -> None:
        """Remove the features of the slots."""
        self._count[slots.index] = 0
        for slot in slots.ids:
            self._most[slot] = 0

    def add(self, slots: SlotBatch, features: Tensor) -> None:
        """Append one feature per slot, (b, D)."""
        count = self._count[slots.index]
        self._features[slots.index, count] = features
        self._count[slots.index] = count + 1
        for slot in slots.ids:
            self._most[slot] += 1

    def is_full(self, ids: Sequence[int]) -> bool:
        """Return whether a slot has no room for another feature, if it can miss more than one."""
        return self.limit > 1 and max(self._most[slot] for slot in ids) >= self.limit

    def take(self, slots: SlotBatch) -> tuple[Tensor, Tensor] | None:
        """Remove and return the features (b, N, D) of the slots and their numbers (b,); None if there are none."""
        most = max(self._most[slot] for slot in slots.ids)
        if most == 0:
            return None
        ((_, width),) = catch_up_widths(most)
        taken = self._features[slots.index][:, :width], self._count[slots.index]
        self.clear(slots)
        return taken
