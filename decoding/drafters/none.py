"""The drafter that proposes nothing: plain decoding is the engine's one loop with this drafter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from decoding.tree import DraftTree, Frontier, Verdict
from decoding.types import Request
from models.lanes import SlotBatch
from models.prefix import Prefix


class NoDrafter:
    """Proposes nothing, remembers nothing."""

    name = "none"
    num_forwards = 0
    vocab_size: int | None = None

    def open(self, num_slots: int, max_context_tokens: int, max_frontier_nodes: int, max_grown_nodes: int) -> None:
        pass

    def prefixes(self, request: Request) -> list[Prefix]:
        return []

    def admit(self, slots: SlotBatch, prefixes: Sequence[list[Prefix]], first: Tensor) -> None:
        pass

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        raise AssertionError("the engine asked the drafter 'none' for drafts")

    def commit(self, slots: SlotBatch, tree: DraftTree, verdict: Verdict) -> None:
        pass

    def wipe(self, slots: SlotBatch) -> None:
        pass
