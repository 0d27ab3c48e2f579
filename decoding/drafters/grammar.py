"""Drafts the tokens that a grammar forces, and restricts another drafter's drafts to what the grammar allows.

After `{"caption": "a dog"`, a schema may leave only `, "count": `: all of these tokens are drafts without any forward.
Text that is forced is drafted in its usual tokens, even if the grammar allows other splits; the target decides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decoding.constraints import Constraints
from decoding.contracts import Drafter, EngineSpec
from decoding.drafters.none import NoDrafter
from decoding.grammar import NO_TOKEN
from decoding.tree import Frontier
from models.kv.lanes import SlotBatch


class GrammarDrafter:
    """Proxy of a drafter, or with `NoDrafter` a drafter of its own, which drafts forced tokens only.

    The inner drafter runs all nodes, also those below forced tokens, so that its state follows the text. Rows without a
    grammar have the drafts of the inner drafter. Each level waits for the device, because the host follows the grammar.
    """

    def __init__(self, inner: Drafter | None = None) -> None:
        self.inner = inner or NoDrafter()
        self.name = "grammar" if inner is None else inner.name
        self._is_alone = inner is None

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def open(self, spec: EngineSpec) -> None:
        assert spec.constraints is not None, "the engine gives no constraints"
        self._constraints: Constraints = spec.constraints
        self._vocab_size = spec.vocab_size
        self._num_forced = [0] * spec.num_slots
        self.inner.open(spec)

    def admit(self, slots: SlotBatch, *rest: Any) -> None:
        for slot in slots.ids:
            self._num_forced[slot] = 0
        self.inner.admit(slots, *rest)

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        """See `Drafter.draft`: −inf for tokens that the grammar forbids, and for all but a forced token."""
        shape = (*frontier.tokens.shape, self._vocab_size)
        if self._is_alone:
            logits = torch.full(shape, -torch.inf, device=frontier.tokens.device)
        else:
            logits = self.inner.draft(slots, frontier)
        if not self._constraints.applies(slots.ids):
            return logits
        forced, allowed = self._constraints.look(slots, frontier.path.tolist())
        is_forced = (forced != NO_TOKEN)[:, :, None]
        for slot, count in zip(slots.ids, is_forced.sum(dim=(1, 2)).tolist(), strict=True):
            self._num_forced[slot] += count
        logits = logits.masked_fill(is_forced | ~allowed, -torch.inf)
        index = forced.clamp_min(0)[:, :, None]
        return logits.scatter(2, index, torch.where(is_forced, 0.0, logits.gather(2, index)))

    def extras(self, slot: int) -> dict[str, Any]:
        return self.inner.extras(slot) | {"grammar_forced_tokens": self._num_forced[slot]}
