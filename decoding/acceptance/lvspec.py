"""LVSpec: strict acceptance of visually relevant drafts, relaxed acceptance of others.

In a block of K drafts the ⌊λK⌋ with the lowest visual relevance may differ from the target's token (Eq. 9, 10), and so
may a draft if the target's token at its position occurs elsewhere in the block (position shift, Eq. 11). "See the
Forest for the Trees: Loosely Speculative Decoding via Visual-Semantic Guidance", 2026. A tree is judged branch by
branch, and the longest accepted branch wins (appendix E).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from decoding.acceptance.relaxed import Mismatches, RelaxedRule
from decoding.acceptance.relevance import VisualMemory
from decoding.contracts import EngineSpec, Judgement, Probe
from models.kv.lanes import SlotBatch


class LVSpec(RelaxedRule):
    """Relax the share `loose` (λ) of each block with the least relevance to the `top_visual` (N) nearest visual states.

    `position_shift` also accepts a draft if the target's token occurs elsewhere in the block. A sample without visual
    tokens has no relevance, so no position is relaxed there. `loose` 0 without `position_shift` relaxes nothing.

    `relevance_of` selects the state of a draft: "draft", the target's state at the draft's position (the paper);
    "before", the state that predicted the position; "embedding", its input embedding, compared with embedded images (an
    ablation of the paper).
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
        # A table from the exact decimal number, because ⌊0.29 · 100⌋ is 28 in binary floating point.
        share = Fraction(repr(float(self.loose)))
        quota = [math.floor(share * length) for length in range(spec.max_levels + 1)]
        self._quota = torch.tensor(quota, dtype=torch.long, device=spec.device)
        self._visual = VisualMemory(spec, of_embeddings=self.relevance_of == "embedding")
        self._embeddings = spec.token_embeddings

    def admit(self, slots: SlotBatch, probes: Sequence[Probe]) -> None:
        self._visual.admit(slots, probes)

    def pardon(self, judgement: Judgement, seen: Mismatches) -> Tensor:
        passes = self._loosened(judgement, seen)
        if self.position_shift:
            passes = passes | self._shifted(judgement, seen)
        return passes

    def _loosened(self, judgement: Judgement, seen: Mismatches) -> Tensor:
        """Which drafts (b, L, N) are among the ⌊λK⌋ least relevant of each branch; of equals the earlier ones."""
        tree, slots = judgement.tree, judgement.slots
        relevance = self._visual.relevance(slots, self._states(judgement), self.top_visual)
        mine, other = relevance[:, None, :], relevance[:, :, None]  # (b, j, i)
        earlier = tree.depth[:, :, None] < tree.depth[:, None, :]
        before = (other < mine) | ((other == mine) & earlier)
        rank = seen.branches.count(torch.ones_like(seen.match), before)
        quota = self._quota[seen.branches.length] * self._visual.has_visual(slots)[:, None]
        return rank < quota[:, :, None]

    def _states(self, judgement: Judgement) -> Tensor:
        """The states of the drafts, (b, N, D)."""
        tree, hidden = judgement.tree, judgement.hidden[:, 0]
        if self.relevance_of == "draft":
            return hidden
        if self.relevance_of == "before":
            return hidden.gather(1, tree.parents.clamp_min(0)[:, :, None].expand_as(hidden))
        assert self._embeddings is not None, "the engine gives the target's embeddings"
        return self._embeddings[tree.tokens]

    @staticmethod
    def _shifted(judgement: Judgement, seen: Mismatches) -> Tensor:
        """Drafts (b, L, N) at whose position the target's token equals some draft of the branch."""
        same = judgement.tree.tokens[:, :, None] == seen.wanted[:, None, :]  # (b, j, i)
        return seen.branches.count(torch.ones_like(seen.match), same) > 0
