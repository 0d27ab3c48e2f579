"""LANTERN: accepts an image code if the target prefers a similar code, within a bound on the distortion.

Each draft x̃ has a neighbourhood A(k, δ) (Jang et al. 2024, "LANTERN", section 3.3, arXiv 2410.03355; as in the paper,
q is the target's distribution). Greedy rows accept x̃ if it is the argmax after its neighbours' probability is added to
its own. Sampled rows accept x̃ if the target's sample y = argmax(log q + g) is in A(k, δ); a draft selected without g
is then accepted with the paper's probability, Σ of q over A(k, δ). `lantern_residual` samples as the papers do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.acceptance.neighbourhood import Divergence, Neighbourhood
from decoding.acceptance.relaxed import Mismatches, RelaxedRule
from decoding.contracts import EngineSpec, VerificationOutput


class Lantern(RelaxedRule):
    """Rule that relaxes a mismatch if the draft is similar to the target's token; parameters as in `Neighbourhood`.

    If several siblings are acceptable, sampled rows take the first, as if they were tried in order, and greedy rows the
    sibling with the longest accepted path. `delta` 0 (λ = 1 for "multiplicative") relaxes nothing.
    """

    def __init__(
        self,
        table: Tensor,
        k: int = 1000,
        delta: float = 0.1,
        divergence: Divergence = "tvd",
        k_counts_draft: bool = True,
    ) -> None:
        self.neighbourhood = Neighbourhood(table, k, delta, divergence, k_counts_draft)

    def open(self, spec: EngineSpec) -> None:
        super().open(spec)
        self.neighbourhood.open(spec)

    def pardon(self, verification: VerificationOutput, mismatches: Mismatches) -> Tensor:
        tree = verification.tree
        near = self.neighbourhood.around(tree.tokens)  # (b, N, n)
        candidates = torch.cat([tree.tokens[:, :, None], mismatches.wanted[:, :, None], near], dim=-1)
        probs = _at_drafts(verification, candidates)
        draft_probs, best, near_probs = probs[..., 0], probs[..., 1], probs[..., 2:]
        members = self.neighbourhood.members(tree.tokens, draft_probs, near, near_probs)
        stands_for_it = (members & (near == mismatches.wanted[:, :, None])).any(dim=-1)
        gathered = (near_probs * members).sum(dim=-1, dtype=torch.float64)
        total = draft_probs + gathered
        # If the target's token is a neighbour, its probability is part of `total`, so the draft has at least as much.
        is_best = (total > best) | ((total == best) & (tree.tokens < mismatches.wanted))
        outgrows_it = stands_for_it | (is_best & (gathered > 0))
        return torch.where(verification.rows.is_sampled[:, None], stands_for_it, outgrows_it)[:, None]

    def accepts(self, verification: VerificationOutput, mismatches: Mismatches) -> Tensor:
        tree = verification.tree
        accept = super().accepts(verification, mismatches)
        siblings = (tree.parents[:, :, None] == tree.parents[:, None, :]).tril(-1)  # (b, i, j): j precedes i
        is_first = ~(siblings & (accept & tree.valid[:, None])).any(dim=-1)
        return accept & (is_first | ~verification.rows.is_sampled[:, None])[:, None]


def _at_drafts(verification: VerificationOutput, tokens: Tensor) -> Tensor:
    """Return the target's probabilities (b, N, m) of `tokens` (b, N, m) at the position of each draft."""
    logits = verification.processed_logits
    above = verification.tree.parents.clamp_min(0)
    index = above[:, :, None] * logits.shape[-1] + tokens
    token_logits = logits.flatten(1).gather(1, index.flatten(1)).view_as(index)
    return (token_logits - logits.logsumexp(dim=-1).gather(1, above)[:, :, None]).exp()
