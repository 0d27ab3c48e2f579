"""Rejection sampling, lossless in distribution: accepts by the ratio of probabilities, else samples the residual.

For chains this is Algorithm 1 of Leviathan, Kalman, Matias 2023 (arXiv 2211.17192). Siblings are sampled without
replacement (the policy ranks by log q + independent Gumbel noise). Each sibling is compared with the target's mass that
remains after earlier siblings: p ← norm(max(p − q, 0)), q ← q without the tried token, renormalised. Drafts that were
selected instead of sampled (top-k children, prompt lookup) are certain: q is 1 at the tried token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.contracts import Acceptance, VerificationOutput
from decoding.noise import Stream
from decoding.tree import AcceptanceResult


@dataclass(frozen=True)
class RejectionTrial:
    """One draft per row to verify: `law` (b, V) is the target's distribution after the draft's parent, `mass` (b, V)
    its remainder after rejected siblings, `token` (b,) the draft, `drawn_from` (b, V) the drafter's distribution
    without rejected siblings; with `is_certain`, `drawn_from` is 1 at the draft."""

    law: Tensor
    mass: Tensor
    token: Tensor
    drawn_from: Tensor
    is_certain: bool


class Rejection(Acceptance):
    """Rule that accepts draft x with probability min(1, p(x) / q(x)), and else samples from the residual."""

    draft_stream = Stream.DRAFT
    needs_draft_probs = True

    def weigh(self, trial: RejectionTrial) -> tuple[Tensor, Tensor]:
        """Return the numerator (b,) of each draft's acceptance ratio, and the mass (b, V) that remains on rejection."""
        prob = trial.mass.gather(1, trial.token[:, None])[:, 0]
        return prob, normalise((trial.mass - trial.drawn_from).clamp_min(0), trial.mass)

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        tree, processed_logits = verification.tree, verification.processed_logits
        b, _, vocab_size = processed_logits.shape
        device = processed_logits.device
        row = torch.arange(b, device=device)
        rank = tree.sibling_rank()
        current = torch.zeros(b, dtype=torch.long, device=device)
        alive = torch.ones(b, dtype=torch.bool, device=device)
        n = torch.ones(b, dtype=torch.long, device=device)
        path = [current]
        relaxed = [torch.zeros_like(alive)]
        law = mass = self._target_probs(verification, current)
        for depth in range(tree.num_levels):
            draft = None if tree.draft_probs is None else tree.draft_probs[row, current]
            taken, odd = torch.zeros_like(alive), torch.zeros_like(alive)
            child = current
            for sibling in range(tree.max_siblings):
                match = (tree.parents == current[:, None]) & (rank == sibling) & tree.valid
                here = alive & ~taken & match.any(dim=1)
                node = match.long().argmax(dim=1)
                token = tree.tokens[row, node]
                tried = F.one_hot(token, vocab_size).to(mass.dtype)
                trial = RejectionTrial(law, mass, token, tried if draft is None else draft, draft is None)
                weight, rest = self.weigh(trial)
                needed = verification.noise.uniform(Stream.ACCEPT, sibling)[:, depth] * trial.drawn_from[row, token]
                accept = here & (needed < weight)
                child = torch.where(accept, node, child)
                taken = taken | accept
                # Accepted only because `weigh` is larger than the target's own probability of the draft.
                odd = odd | (accept & (needed >= mass[row, token]))
                refused = (here & ~accept)[:, None]
                mass = torch.where(refused, rest, mass)
                if draft is not None:
                    residual = draft * (1 - tried)
                    draft = torch.where(refused, normalise(residual, residual), draft)
            alive = taken
            current = torch.where(alive, child, current)
            path.append(torch.where(alive, current, 0))
            relaxed.append(odd)
            n = n + alive
            law = torch.where(alive[:, None], self._target_probs(verification, current), law)
            mass = torch.where(alive[:, None], law, mass)
        noise = verification.noise.gumbel(Stream.RESIDUAL)[row, n - 1]
        scores = mass.log() + noise * verification.rows.is_sampled[:, None]
        return AcceptanceResult(torch.stack(path, dim=1), n, scores.argmax(dim=-1), torch.stack(relaxed, dim=1))

    @staticmethod
    def _target_probs(verification: VerificationOutput, nodes: Tensor) -> Tensor:
        """Return the target's distributions (b, V) after `nodes` (b,); one-hot on greedy rows."""
        logits = verification.processed_logits[torch.arange(nodes.shape[0], device=nodes.device), nodes]
        certain = F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
        return torch.where(verification.rows.is_sampled[:, None], logits.softmax(dim=-1), certain)


def normalise(mass: Tensor, fallback: Tensor) -> Tensor:
    """Scale rows of `mass` (b, V) to sum 1; all-zero rows (p = q up to rounding) become `fallback` (b, V)."""
    total = mass.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, mass / total.clamp_min(torch.finfo(mass.dtype).tiny), fallback)
