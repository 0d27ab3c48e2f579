"""Visual relevance of drafts: mean of the top-N cosines with the visual states of the target's prefill.

Shapes: S slots, C visual positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.contracts import EngineSpec, Probe
from models.kv.lanes import SlotBatch

COLUMN_STEP = 64
"""Memory grows by this many columns."""
CHUNK_COLUMNS = 1024
"""Columns compared at once: bounds the fp32 copy that a comparison makes of states kept in half precision."""


class VisualMemory:
    """Visual states (S, C, D) of the samples in their slots, in the target's own dtype, and their lengths' inverses.

    C grows to the largest number of visual columns so far.
    """

    def __init__(self, spec: EngineSpec, of_embeddings: bool = False) -> None:
        self._spec = spec
        self._of_embeddings = of_embeddings
        self._counts = [0] * spec.num_slots
        self._count = torch.zeros(spec.num_slots, dtype=torch.long, device=spec.device)
        self._states: Tensor | None = None
        self._inverse = torch.zeros(spec.num_slots, 0, device=spec.device)

    def admit(self, slots: SlotBatch, probes: Sequence[Probe]) -> None:
        """Keep the post-norm states (or the embeddings) of each prompt's visual columns; a prompt may have none."""
        for slot, probe in zip(slots.ids, probes, strict=True):
            if self._of_embeddings:
                whole = probe.prefix.embeds
            else:
                assert probe.hidden is not None, "visual relevance needs the prefill's hidden states"
                whole = probe.hidden[0]
            states = whole[probe.prefix.visual]
            count = states.shape[0]
            self._counts[slot] = count
            self._count[slot] = count
            if count:
                memory = self._reserve(count, states)
                memory[slot, :count] = states
                self._inverse[slot, :count] = _inverse_norm(states.float())

    def _reserve(self, count: int, like: Tensor) -> Tensor:
        """The memory, wide enough for `count` columns."""
        held = self._states
        if held is not None and held.shape[1] >= count:
            return held
        width = min(-(-count // COLUMN_STEP) * COLUMN_STEP, self._spec.max_context_tokens)
        grown = like.new_zeros(self._spec.num_slots, width, like.shape[-1])
        inverse = self._inverse.new_zeros(self._spec.num_slots, width)
        if held is not None:
            grown[:, : held.shape[1]] = held
            inverse[:, : held.shape[1]] = self._inverse
        self._states, self._inverse = grown, inverse
        return grown

    def has_visual(self, slots: SlotBatch) -> Tensor:
        """Which samples have visual columns at all, (b,) bool."""
        return self._count[slots.index] > 0

    def relevance(self, slots: SlotBatch, hidden: Tensor, top: int) -> Tensor:
        """Mean of the `top` largest cosines of states `hidden` (b, N, D) with the sample's visual states, (b, N) fp32.

        A sample with fewer visual columns averages those it has; one with none gets 0. LVSpec, Eq. 8.
        """
        widest = max(self._counts[slot] for slot in slots.ids)
        if widest == 0 or self._states is None:
            return hidden.new_zeros(hidden.shape[:2], dtype=torch.float32)
        own = hidden.float()
        own = own * _inverse_norm(own)[..., None]
        count = self._count[slots.index]
        best: Tensor | None = None
        for start in range(0, widest, CHUNK_COLUMNS):
            stop = min(start + CHUNK_COLUMNS, widest)
            kept = slots.of(self._states)[:, start:stop].float()
            kept = kept * slots.of(self._inverse)[:, start:stop, None]
            cosine = own @ kept.transpose(1, 2)
            columns = torch.arange(start, stop, device=cosine.device)
            cosine = cosine.masked_fill(columns >= count[:, None, None], -torch.inf)
            best = cosine if best is None else torch.cat([best, cosine], dim=-1)
            best = best.topk(min(top, best.shape[-1]), dim=-1).values
        assert best is not None
        num = count.clamp(1, top)[:, None]
        return best.masked_fill(best == -torch.inf, 0.0).sum(dim=-1) / num


def _inverse_norm(states: Tensor) -> Tensor:
    """1 / ‖x‖ (…,) of fp32 states (…, D); a zero state has cosine 0 with everything."""
    norm: Tensor = torch.linalg.vector_norm(states, dim=-1)
    return norm.clamp_min(torch.finfo(torch.float32).tiny).reciprocal()
