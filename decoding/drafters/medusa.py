"""Medusa: drafts with heads on the target's last hidden state, one head per depth.

Head d predicts all drafts of depth d + 1, independent of their parents. Cai et al. 2024 (arXiv 2401.10774), 3.1.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from decoding.contracts import Drafter, EngineSpec, PrefillOutput, VerificationOutput
from decoding.drafters.merge import Merge, SingleLane, to_vocabulary
from decoding.tree import AcceptanceResult, Frontier
from models.heads.medusa import MedusaHeads
from models.kv.feature_layers import LAST
from models.kv.lanes import SlotBatch


class MedusaDrafter(Drafter):
    """Drafter with Medusa `heads`; `num_lanes` is the target's.

    State per slot: `_state` (S, R, D), the target's hidden state that predicted the pending token.
    """

    name = "medusa"
    feature_layers = (LAST,)

    def __init__(self, heads: MedusaHeads, num_lanes: int = 1, merge: Merge | None = None) -> None:
        self.heads = heads
        self.num_lanes = num_lanes
        self.merge = merge or SingleLane()

    def open(self, spec: EngineSpec) -> None:
        shape = self.heads.shape
        assert spec.hidden_size == shape.state_size, (spec.hidden_size, shape.state_size)
        assert spec.max_levels <= shape.num_heads, (
            f"a tree of {spec.max_levels} levels needs as many heads, not {shape.num_heads}"
        )
        self._vocab_size = spec.vocab_size
        self.merge.open(spec, self.num_lanes)
        weight = next(self.heads.parameters())
        self._state = weight.new_zeros(spec.num_slots, self.num_lanes, shape.state_size)

    def admit(self, slots: SlotBatch, first: Tensor, prefill_outputs: Sequence[PrefillOutput]) -> None:
        states = [
            prefill_output.features[:, -1] for prefill_output in prefill_outputs if prefill_output.features is not None
        ]
        assert len(states) == len(prefill_outputs), "Medusa heads need the hidden states of the target's prefill"
        self._state[slots.index] = torch.stack(states).to(self._state.dtype)

    def replay_key(self, slots: SlotBatch, num_levels: int) -> Hashable | None:
        return ()

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        width = frontier.tokens.shape[1]
        if frontier.depth == 0:
            # All heads use the same state, so they count as one forward.
            self.num_forwards += 1
            self._step_state = self._state[slots.index]
        logits = self.heads.logits(frontier.depth, self._step_state)[:, :, None]  # (b, R, 1, V)
        merged = self.merge.merge(slots, to_vocabulary(logits, self._vocab_size), frontier.depth)
        return merged.expand(-1, width, -1)

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> None:
        num_lanes, size = verification.features.shape[1], verification.features.shape[3]
        last = result.path.gather(1, (result.n - 1)[:, None])
        state = verification.features.gather(2, last[:, None, :, None].expand(-1, num_lanes, -1, size))[:, :, 0]
        self._state[verification.slots.index] = state.to(self._state.dtype)
