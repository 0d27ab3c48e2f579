"""LANTERN with the draws of its papers: accept by the ratio of probabilities, else draw from the residual.

A draft x̃ from p is accepted with probability min(1, Σ of q over A(k, δ) / p(x̃)) (LANTERN, Algorithm 1, arXiv
2410.03355; on static trees LANTERN++, Park et al. 2025, arXiv 2502.06352). As in the papers, q is the target's
distribution and p the drafter's. Paper and public code use different residuals of q after a rejection; both are
implemented. Drafts, draws and trees are as in `rejection`, and δ = 0 equals it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from decoding.acceptance.lantern import Lantern
from decoding.acceptance.neighbourhood import Divergence, Neighbourhood
from decoding.acceptance.rejection import Rejection, Trial, normalise
from decoding.contracts import Judgement
from decoding.noise import Stream
from decoding.tree import Verdict

Residual = Literal["paper", "code"]


class LanternResidual(Lantern):
    """Sampled rows by ratio and residual; greedy rows and options as in `Lantern`.

    `residual` "paper" is [q_{k,δ} − p]₊, which removes the drafts' A(k, δ), computed from the target's distribution.
    "code" computes A(k, δ) from the remaining distribution. A rejected draft with gathered mass removes the first
    neighbours of its row, one more than are examined: from the target if drafts are certain; from the drafter's
    distribution before it is subtracted if they were drawn. If nothing remains, everything is used.
    """

    draft_stream = Stream.DRAFT
    needs_draft_probs = True

    def __init__(
        self,
        table: Tensor,
        k: int = 1000,
        delta: float = 0.1,
        divergence: Divergence = "tvd",
        k_counts_draft: bool = True,
        residual: Residual = "paper",
    ) -> None:
        super().__init__(table, k, delta, divergence, k_counts_draft)
        self._drawn = (PaperResidual if residual == "paper" else CodeResidual)(self.neighbourhood)

    def judge(self, judgement: Judgement) -> Verdict:
        rows = judgement.rows
        cold = replace(rows, temperature=torch.zeros_like(rows.temperature), any_sampled=False)
        greedy = super().judge(replace(judgement, rows=cold))
        if not rows.any_sampled:
            return greedy
        drawn = self._drawn.judge(judgement)
        sampled = rows.is_sampled
        return Verdict(
            path=torch.where(sampled[:, None], drawn.path, greedy.path),
            n=torch.where(sampled, drawn.n, greedy.n),
            next=torch.where(sampled, drawn.next, greedy.next),
            relaxed=torch.where(sampled[:, None], drawn.relaxed, greedy.relaxed),
        )


class PaperResidual(Rejection):
    """[q_{k,δ}(· | x̃) − p]₊."""

    def __init__(self, neighbourhood: Neighbourhood) -> None:
        self.neighbourhood = neighbourhood

    def weigh(self, trial: Trial) -> tuple[Tensor, Tensor]:
        near, members = gather_members(self.neighbourhood, trial, trial.law)
        lent = trial.mass.gather(1, near) * members
        token = trial.token[:, None]
        weight = trial.mass.gather(1, token) + lent.sum(dim=-1, keepdim=True)
        distorted = trial.mass.scatter(1, near, trial.mass.gather(1, near) * ~members).scatter(1, token, weight)
        return weight[:, 0], normalise((distorted - trial.drawn_from).clamp_min(0), trial.mass)


class CodeResidual(Rejection):
    """What the public code leaves (`evaluate_posterior`, and its form for static trees)."""

    def __init__(self, neighbourhood: Neighbourhood) -> None:
        self.neighbourhood = neighbourhood

    def weigh(self, trial: Trial) -> tuple[Tensor, Tensor]:
        near, members = gather_members(self.neighbourhood, trial, trial.mass)
        lent = (trial.mass.gather(1, near) * members).sum(dim=-1, keepdim=True)
        own = trial.mass.gather(1, trial.token[:, None])
        wide = self.neighbourhood.around_and_one_more(trial.token)
        # The code also empties neighbourhoods that lent nothing, but then δ = 0 would not equal `rejection`.
        emptied = self.neighbourhood.may_lend(trial.token, wide) & (lent > 0)
        mass, subtracted = trial.mass, trial.drawn_from
        if trial.is_certain:
            mass = mass.scatter(1, wide, mass.gather(1, wide) * ~emptied)
        else:
            subtracted = subtracted.scatter(1, wide, subtracted.gather(1, wide) * ~emptied)
        everything = torch.full_like(mass, 1.0 / mass.shape[-1])
        return (own + lent)[:, 0], normalise((mass - subtracted).clamp_min(0), everything)


def gather_members(neighbourhood: Neighbourhood, trial: Trial, law: Tensor) -> tuple[Tensor, Tensor]:
    """The drafts' neighbours (b, n), and which of them are in A(k, δ) under `law` (b, V)."""
    near = neighbourhood.around(trial.token)
    drafted = law.gather(1, trial.token[:, None])[:, 0]
    return near, neighbourhood.members(trial.token, drafted, near, law.gather(1, near))
