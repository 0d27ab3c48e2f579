"""LVSpec: accepts visually relevant drafts strictly and relaxes the others.

In a block of K drafts, the ⌊λK⌋ drafts with the lowest visual relevance may differ from the target's token (Eq. 9, 10).
"See the Forest for the Trees: Loosely Speculative Decoding via Visual-Semantic Guidance", 2026. A tree is judged branch
by branch, and the longest accepted branch wins (appendix E).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from decoding.acceptance.relaxed import Mismatches, RelaxedRule
from decoding.contracts import EngineSpec, PrefillOutput, VerificationOutput
from models.kv.lanes import SlotBatch

COLUMN_STEP = 64
"""The buffer of visual states grows in steps of this many token positions."""
CHUNK_COLUMNS = 1024
"""Token positions compared at once; limits the size of the fp32 copy of states that are stored in half precision."""


class LVSpec(RelaxedRule):
    """Rule that relaxes the share `loose` (λ) of each block's drafts, those with the lowest visual relevance.

    Relevance is the mean cosine to the `top_visual` (N) nearest visual states. `position_shift` also accepts a draft if
    the target's token occurs elsewhere in the block (Eq. 11); without it, `loose` 0 relaxes nothing. `loose` does not
    apply to samples without visual tokens.

    `relevance_of` selects the vector of a draft: "draft", the target's hidden state at the draft's node (the paper);
    "before", the hidden state that predicted the draft; "embedding", input embeddings of draft and visual tokens.
    """

    def __init__(
        self,
        loose: float = 0.7,
        top_visual: int = 10,
        position_shift: bool = True,
        relevance_of: Literal["draft", "before", "embedding"] = "draft",
    ) -> None:
        self.loose = loose
        self.top_visual = top_visual
        self.position_shift = position_shift
        self.relevance_of = relevance_of
        self.needs_hidden = relevance_of != "embedding"

    def open(self, spec: EngineSpec) -> None:
        super().open(spec)
        # Computed from the exact decimal number, because ⌊0.29 · 100⌋ is 28 in binary floating point.
        share = Fraction(repr(float(self.loose)))
        quota = [math.floor(share * length) for length in range(spec.max_levels + 1)]
        self._quota = torch.tensor(quota, dtype=torch.long, device=spec.device)
        self._visual = VisualMemory(spec, of_embeddings=self.relevance_of == "embedding")
        self._embeddings = spec.token_embeddings

    def admit(self, slots: SlotBatch, prefill_outputs: Sequence[PrefillOutput]) -> None:
        self._visual.admit(slots, prefill_outputs)

    def replay_key(self, slots: SlotBatch) -> Hashable | None:
        return self._visual.replay_key(slots)

    def pardon(self, verification: VerificationOutput, mismatches: Mismatches) -> Tensor:
        passes = self._loosened(verification, mismatches)
        if self.position_shift:
            passes = passes | self._shifted(verification, mismatches)
        return passes

    def _loosened(self, verification: VerificationOutput, mismatches: Mismatches) -> Tensor:
        """Return a mask (b, L, N) of the ⌊λK⌋ least relevant drafts of each branch; ties go to the smaller depth."""
        tree, slots = verification.tree, verification.slots
        relevance = self._visual.relevance(slots, self._states(verification), self.top_visual)
        mine, other = relevance[:, None, :], relevance[:, :, None]  # (b, j, i)
        earlier = tree.depth[:, :, None] < tree.depth[:, None, :]
        before = (other < mine) | ((other == mine) & earlier)
        rank = mismatches.branches.count(torch.ones_like(mismatches.match), before)
        quota = self._quota[mismatches.branches.length] * self._visual.has_visual(slots)[:, None]
        return rank < quota[:, :, None]

    def _states(self, verification: VerificationOutput) -> Tensor:
        """Return the vectors (b, N, D) of the drafts that `relevance_of` selects."""
        tree, hidden = verification.tree, verification.hidden[:, 0]
        if self.relevance_of == "draft":
            return hidden
        if self.relevance_of == "before":
            return hidden.gather(1, tree.parents.clamp_min(0)[:, :, None].expand_as(hidden))
        assert self._embeddings is not None, "the engine gives the target's embeddings"
        return self._embeddings[tree.tokens]

    @staticmethod
    def _shifted(verification: VerificationOutput, mismatches: Mismatches) -> Tensor:
        """Return a mask (b, L, N) of the drafts for which the target's token equals some draft of the branch."""
        same = verification.tree.tokens[:, :, None] == mismatches.wanted[:, None, :]  # (b, j, i)
        return mismatches.branches.count(torch.ones_like(mismatches.match), same) > 0


class VisualMemory:
    """Buffer of visual states (S, C, D) per slot, in the target's dtype, and of their inverse norms (S, C).

    C grows with the largest number of visual tokens in a prompt. With `of_embeddings` the states are input embeddings.
    """

    def __init__(self, spec: EngineSpec, of_embeddings: bool = False) -> None:
        self._spec = spec
        self._of_embeddings = of_embeddings
        self._counts = [0] * spec.num_slots
        self._count = torch.zeros(spec.num_slots, dtype=torch.long, device=spec.device)
        self._states: Tensor | None = None
        self._inverse = torch.zeros(spec.num_slots, 0, device=spec.device)

    def admit(self, slots: SlotBatch, prefill_outputs: Sequence[PrefillOutput]) -> None:
        """Store the states of each prompt's visual tokens: input embeddings if `of_embeddings` is set, else the hidden
        states of the prefill after the final norm. A prompt may have no visual tokens."""
        for slot, prefill_output in zip(slots.ids, prefill_outputs, strict=True):
            if self._of_embeddings:
                features = prefill_output.prefix.embeds
            else:
                assert prefill_output.hidden is not None, "visual relevance needs the prefill's hidden states"
                features = prefill_output.hidden[0]
            states = features[prefill_output.prefix.visual]
            count = states.shape[0]
            self._counts[slot] = count
            self._count[slot] = count
            if count:
                memory = self._reserve(count, states)
                memory[slot, :count] = states
                self._inverse[slot, :count] = _inverse_norm(states.float())

    def _reserve(self, count: int, like: Tensor) -> Tensor:
        """Return the buffer, grown to at least `count` token positions; `like` gives its dtype and D."""
        states = self._states
        if states is not None and states.shape[1] >= count:
            return states
        width = min(-(-count // COLUMN_STEP) * COLUMN_STEP, self._spec.max_context_tokens)
        grown = like.new_zeros(self._spec.num_slots, width, like.shape[-1])
        inverse = self._inverse.new_zeros(self._spec.num_slots, width)
        if states is not None:
            grown[:, : states.shape[1]] = states
            inverse[:, : states.shape[1]] = self._inverse
        self._states, self._inverse = grown, inverse
        return grown

    def replay_key(self, slots: SlotBatch) -> Hashable:
        """Return the number of positions that `relevance` reads, and the width of the buffers, which are replaced when
        it grows."""
        return self._widest(slots), self._inverse.shape[1]

    def _widest(self, slots: SlotBatch) -> int:
        """Return the largest number of visual tokens of a slot."""
        return max([self._counts[slot] for slot in slots.ids] or [0])

    def has_visual(self, slots: SlotBatch) -> Tensor:
        """Return a mask (b,) of the samples with visual tokens."""
        return self._count[slots.index] > 0

    def relevance(self, slots: SlotBatch, hidden: Tensor, top: int) -> Tensor:
        """Return the mean (b, N) of the `top` largest cosines of `hidden` (b, N, D) to the sample's visual states.

        A sample with fewer visual tokens averages over all of them; without any, the result is 0. LVSpec, Eq. 8.
        """
        widest = self._widest(slots)
        if widest == 0 or self._states is None:
            return hidden.new_zeros(hidden.shape[:2], dtype=torch.float32)
        states = hidden.float()
        states = states * _inverse_norm(states)[..., None]
        count = self._count[slots.index]
        best: Tensor | None = None
        for start in range(0, widest, CHUNK_COLUMNS):
            stop = min(start + CHUNK_COLUMNS, widest)
            visual_states = slots.of(self._states)[:, start:stop].float()
            visual_states = visual_states * slots.of(self._inverse)[:, start:stop, None]
            cosine = states @ visual_states.transpose(1, 2)
            columns = torch.arange(start, stop, device=cosine.device)
            cosine = cosine.masked_fill(columns >= count[:, None, None], -torch.inf)
            best = cosine if best is None else torch.cat([best, cosine], dim=-1)
            best = best.topk(min(top, best.shape[-1]), dim=-1).values
        assert best is not None
        num = count.clamp(1, top)[:, None]
        return best.masked_fill(best == -torch.inf, 0.0).sum(dim=-1) / num


def _inverse_norm(states: Tensor) -> Tensor:
    """Return 1 / ‖x‖ (…,) of fp32 states (…, D), finite for zero states so that their cosines are 0."""
    norm: Tensor = torch.linalg.vector_norm(states, dim=-1)
    return norm.clamp_min(torch.finfo(torch.float32).tiny).reciprocal()
