"""Typical acceptance: accepts a draft if its target probability exceeds a threshold that falls with the entropy.

The threshold is min(ε, α · exp(−H)), with H the entropy of the target's distribution (Cai et al. 2024, "Medusa",
section 2.3.1, arXiv 2401.10774). Of equally long paths the more probable one wins. The rule is deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.acceptance.relaxed import Mismatches, RelaxedRule
from decoding.contracts import VerificationOutput

ENTROPY_FLOOR = 1e-5
"""Added to p inside the logarithm of the entropy, as in Medusa's code."""


class Typical(RelaxedRule):
    """Rule that relaxes a mismatch with p > min(`epsilon`, `alpha` · exp(−H)).

    For sampled rows, p is the distribution that they sample from; for greedy rows, the softmax at `temperature`.
    `epsilon` of at least 1 with `alpha` of at least the vocabulary size relaxes nothing.
    """

    def __init__(self, epsilon: float = 0.09, alpha: float = 0.3, temperature: float = 0.7) -> None:
        self.epsilon = epsilon
        self.alpha = alpha
        self.temperature = temperature

    def pardon(self, verification: VerificationOutput, mismatches: Mismatches) -> Tensor:
        probs = self._logprobs(verification).exp()
        entropy = -(probs * (probs + ENTROPY_FLOOR).log()).sum(dim=-1)
        bound = (self.alpha * torch.exp(-entropy)).clamp_max(self.epsilon)
        passes = probs > bound[:, :, None]
        return _at_drafts(verification, passes)[:, None]

    def merit(self, verification: VerificationOutput) -> Tensor | None:
        # Finite, so that children removed by a filter do not make a path's sum infinite or NaN.
        return _at_drafts(verification, self._logprobs(verification)).clamp_min(-1e4)

    def _logprobs(self, verification: VerificationOutput) -> Tensor:
        """Return the log-probabilities (b, N, V) of the token after every node."""
        scale = torch.where(verification.rows.is_sampled, 1.0, self.temperature)
        return (verification.processed_logits / scale[:, None, None]).log_softmax(dim=-1)


def _at_drafts(verification: VerificationOutput, values: Tensor) -> Tensor:
    """Return `values` (b, N, V) at each draft's parent and for the draft's token, (b, N)."""
    tree = verification.tree
    above = values.gather(1, tree.parents.clamp_min(0)[:, :, None].expand(-1, -1, values.shape[-1]))
    return above.gather(-1, tree.tokens[:, :, None])[..., 0]
