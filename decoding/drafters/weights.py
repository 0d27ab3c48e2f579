"""How TABED chooses the weights of its lanes from what each would have drafted (TABED, Algorithm 1 and Appendix B).

Pure functions of scores summed over the observation window. Shapes: b rows, J candidates, R lanes.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import torch
from torch import Tensor


def simplex_grid(num_lanes: int, steps: int) -> Tensor:
    """All weights (J, R) that are multiples of 1 / `steps` and sum to one (policy S_W of MT*, Appendix B.2)."""
    rows = []
    for bars in combinations(range(steps + num_lanes - 1), num_lanes - 1):
        edges = (-1, *bars, steps + num_lanes - 1)
        rows.append([right - left - 1 for left, right in pairwise(edges)])
    return torch.tensor(rows, dtype=torch.float32) / steps


def pick_candidate(grid: Tensor, matches: Tensor, errors: Tensor, by_matches: bool) -> Tensor:
    """The best row of `grid` (J, R) for each sample, (b, R).

    `matches` and `errors` (b, J) are summed over the window. With `by_matches` most argmax matches win and the smaller
    error breaks ties; otherwise the smaller error wins. Equal candidates: the one nearest to equal weights, so that a
    sample without history gets them.
    """
    num_candidates = grid.shape[0]
    imbalance = (grid - 1.0 / grid.shape[1]).square().sum(1)
    # Three keys by three stable sorts, least significant first: a weighted sum of keys would lose the small ones.
    order = imbalance.argsort(stable=True).expand(errors.shape[0], num_candidates)
    order = order.gather(1, errors.gather(1, order).argsort(dim=1, stable=True))
    if by_matches:
        order = order.gather(1, matches.gather(1, order).argsort(dim=1, stable=True, descending=True))
    return grid[order[:, 0]]


def inverse_error(errors: Tensor, seen: Tensor, temperature: float, linear: bool) -> Tensor:
    """Weights (b, R) from the lanes' own errors (b, R); equal where nothing was `seen` (b,) yet.

    Paper (B.2): softmax(1 / e / τ). Code: softmax(log(1 / e) / τ), which at τ = 1 is 1 / e normalised: `linear`.
    """
    inverse = 1.0 / errors.clamp_min(1e-6)
    scores = inverse.log() if linear else inverse
    weights = (scores / temperature).softmax(dim=1)
    return torch.where(seen[:, None], weights, torch.full_like(weights, 1.0 / errors.shape[1]))


def adaboost(matches: Tensor, seen: Tensor, vocab_size: int, constant: float) -> Tensor:
    """Weights (b, R) ∝ ln(1/ε − 1) + C·ln(K − 1), ε the lane's share of misses (Eq. 2), negative ones cut to 0.

    `matches` (b, R) hits among `seen` (b,) positions; one miss and one hit are added, so that ε is never 0 or 1.
    """
    epsilon = 1.0 - (matches + 1.0) / (seen[:, None] + 2.0)
    weights = ((1.0 / epsilon - 1.0).log() + constant * torch.log(torch.tensor(vocab_size - 1.0))).clamp_min(0.0)
    total = weights.sum(1, keepdim=True)
    equal = torch.full_like(weights, 1.0 / matches.shape[1])
    return torch.where((total > 0) & (seen[:, None] > 0), weights / total.clamp_min(1e-9), equal)


def random_weights(uniform: Tensor) -> Tensor:
    """Uniform numbers (b, R) → weights uniform on the simplex (b, R): the control Random^MT."""
    exponential = -torch.log1p(-uniform)
    return (exponential / exponential.sum(1, keepdim=True)).float()
