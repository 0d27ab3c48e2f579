"""FLy: accepts a mismatch if the target is uncertain at its position and the following drafts match again.

Li et al. 2025, "Training-Free Loosely Speculative Decoding" (arXiv 2511.22972). Each tree branch is judged as a block.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from decoding.acceptance.relaxed import Mismatches, RelaxedRule
from decoding.contracts import VerificationOutput


class Fly(RelaxedRule):
    """Rule that relaxes a mismatch if the target's entropy is at least `min_entropy` and `window` matches follow.

    `window` counts the matches *after* the mismatch; 0 tests the entropy only (FLy⊖). `block_end` selects the drafts at
    the end of a block that are never relaxed: "fit" those with fewer than `window` drafts after them, "margin" one
    more. The entropy is computed over the `top` probabilities. An infinite `min_entropy` relaxes nothing.
    """

    def __init__(
        self, min_entropy: float = 0.3, window: int = 5, top: int = 3, block_end: Literal["margin", "fit"] = "margin"
    ) -> None:
        self.min_entropy = min_entropy
        self.window = window
        self.top = top
        self.margin = 1 if block_end == "margin" and window > 0 else 0

    def pardon(self, verification: VerificationOutput, mismatches: Mismatches) -> Tensor:
        tree = verification.tree
        unsure = top_entropy(verification.target_logits, self.top) >= self.min_entropy
        passes = unsure.gather(1, tree.parents.clamp_min(0))[:, None]
        if self.window == 0:
            return passes
        ahead = tree.depth[:, :, None] - tree.depth[:, None, :]  # (b, j, i): depth of j − depth of i
        followed = mismatches.branches.count(mismatches.match, (ahead > 0) & (ahead <= self.window)) == self.window
        room = mismatches.branches.length[:, :, None] - tree.depth[:, None, :]
        return passes & followed & (room >= self.window + self.margin)


def top_entropy(logits: Tensor, top: int) -> Tensor:
    """Return −Σ p·ln p (…,) in nats over the `top` largest probabilities of `logits` (…, V), not renormalised."""
    logp = logits.float().log_softmax(dim=-1).topk(min(top, logits.shape[-1]), dim=-1).values
    # A token of probability 0 contributes 0 · ln 0 = 0.
    return -(logp.exp() * logp.clamp_min(-1e4)).sum(dim=-1)
