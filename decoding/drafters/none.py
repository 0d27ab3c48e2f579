"""Defines the drafter `none`, which proposes nothing: plain decoding is the engine loop with this drafter."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from decoding.contracts import Drafter
from decoding.tree import Frontier
from models.kv.lanes import SlotBatch


class NoDrafter(Drafter):
    """Drafter without drafts and state."""

    name = "none"

    def replay_key(self, slots: SlotBatch, num_levels: int) -> Hashable | None:
        return ()

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        raise AssertionError("the engine asked the drafter 'none' for drafts")
