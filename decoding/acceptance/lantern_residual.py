"""LANTERN as in its papers: accepts a draft by a ratio of probabilities, else samples from a residual distribution.

A draft x̃ from p is accepted with probability min(1, Σ of q over A(k, δ) / p(x̃)) (LANTERN, Algorithm 1, arXiv
2410.03355; on static trees LANTERN++, Park et al. 2025, arXiv 2502.06352). As in the papers, q is the target's
distribution and p the drafter's. Paper and public code use different residuals of q after a rejection; both are
implemented. Drafts, noise and trees are as in `rejection`; with δ = 0 the results are equal to `rejection`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from decoding.acceptance.lantern import Lantern
from decoding.acceptance.neighbourhood import Neighbourhood
from decoding.acceptance.rejection import Rejection, RejectionTrial, normalise
from decoding.contracts import VerificationOutput
from decoding.noise import Stream
from decoding.tree import AcceptanceResult


class LanternResidual(Lantern):
    """Rule that judges sampled rows by ratio and residual; greedy rows and parameters are as in `Lantern`.

    `residual` "paper" is [q_{k,δ} − p]₊, with A(k, δ) computed from the target's distribution q. "code" computes
    A(k, δ) from the mass that remains after rejected siblings. A rejected draft whose members have mass then zeroes all
    its examined neighbours and one more: in the target's mass if drafts are certain; if they were sampled, in the
    drafter's distribution before it is subtracted. If no mass remains, the residual is uniform over the vocabulary.
    """

    draft_stream = Stream.DRAFT
    needs_draft_probs = True

    def __init__(self, table: Tensor, *options: Any, residual: Literal["paper", "code"] = "paper") -> None:
        super().__init__(table, *options)
        self._drawn = (PaperResidual if residual == "paper" else CodeResidual)(self.neighbourhood)

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        rows = verification.rows
        cold = replace(rows, temperature=torch.zeros_like(rows.temperature), any_sampled=False)
        greedy = super().accept(replace(verification, rows=cold))
        if not rows.any_sampled:
            return greedy
        drawn = self._drawn.accept(verification)
        sampled = rows.is_sampled
        return AcceptanceResult(
            path=torch.where(sampled[:, None], drawn.path, greedy.path),
            n=torch.where(sampled, drawn.n, greedy.n),
            next=torch.where(sampled, drawn.next, greedy.next),
            relaxed=torch.where(sampled[:, None], drawn.relaxed, greedy.relaxed),
        )


class PaperResidual(Rejection):
    """Rejection with the residual of the paper, [q_{k,δ}(· | x̃) − p]₊."""

    def __init__(self, neighbourhood: Neighbourhood) -> None:
        self.neighbourhood = neighbourhood

    def weigh(self, trial: RejectionTrial) -> tuple[Tensor, Tensor]:
        near, members = gather_members(self.neighbourhood, trial, trial.law)
        lent = trial.mass.gather(1, near) * members
        token = trial.token[:, None]
        weight = trial.mass.gather(1, token) + lent.sum(dim=-1, keepdim=True)
        distorted = trial.mass.scatter(1, near, trial.mass.gather(1, near) * ~members).scatter(1, token, weight)
        return weight[:, 0], normalise((distorted - trial.drawn_from).clamp_min(0), trial.mass)


class CodeResidual(Rejection):
    """Rejection with the residual of the public code (`evaluate_posterior`, and its variant for static trees)."""

    def __init__(self, neighbourhood: Neighbourhood) -> None:
        self.neighbourhood = neighbourhood

    def weigh(self, trial: RejectionTrial) -> tuple[Tensor, Tensor]:
        near, members = gather_members(self.neighbourhood, trial, trial.mass)
        lent = (trial.mass.gather(1, near) * members).sum(dim=-1, keepdim=True)
        draft_mass = trial.mass.gather(1, trial.token[:, None])
        wide = self.neighbourhood.around_and_one_more(trial.token)
        # The public code also zeroes neighbourhoods without mass, but then δ = 0 would not equal `rejection`.
        emptied = self.neighbourhood.may_lend(trial.token, wide) & (lent > 0)
        mass, subtracted = trial.mass, trial.drawn_from
        if trial.is_certain:
            mass = mass.scatter(1, wide, mass.gather(1, wide) * ~emptied)
        else:
            subtracted = subtracted.scatter(1, wide, subtracted.gather(1, wide) * ~emptied)
        everything = torch.full_like(mass, 1.0 / mass.shape[-1])
        return (draft_mass + lent)[:, 0], normalise((mass - subtracted).clamp_min(0), everything)


def gather_members(neighbourhood: Neighbourhood, trial: RejectionTrial, law: Tensor) -> tuple[Tensor, Tensor]:
    """Return the drafts' neighbours (b, n) and a mask (b, n) of those in A(k, δ), computed from `law` (b, V)."""
    near = neighbourhood.around(trial.token)
    drafted = law.gather(1, trial.token[:, None])[:, 0]
    return near, neighbourhood.members(trial.token, drafted, near, law.gather(1, near))
