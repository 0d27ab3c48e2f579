"""Computes depth and width of SAGE's trees from the entropy of the draft distribution.

The paper (Tong et al. 2026, "SAGE: Accelerating Vision-Language Models via Entropy-Guided Adaptive Speculative
Decoding", arXiv 2602.00523) is ambiguous in several points; `SageSettings` has a field for each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class SageSettings:
    """Parameters of the paper, and its ambiguities that change results; docs/methods/sage.md has the others.

    `max_nodes` does not count the root. `depth_cap` limits D_max, which increases with long accepted paths.
    `max_expanded` is the maximum number of nodes with children per level; with the paper's parameters and the
    cumulative threshold, no distribution was found that needs more than six.
    """

    min_depth: int = 3
    max_depth: int = 8
    depth_cap: int = 8
    min_width: int = 2
    max_width: int = 10
    top_k: int = 10
    max_nodes: int = 64
    max_expanded: int = 6
    threshold_scale: float = 0.1
    threshold: Literal["cumulative", "node"] = "cumulative"
    threshold_gates: Literal["inclusion", "expansion"] = "inclusion"
    source: Literal["root", "accepted_leaf", "mean"] = "root"
    initial_confidence: float = 0.5
    history_window: int = 10
    history_low: float = 2.0
    history_high: float = 3.0


def confidence(probs: Tensor) -> Tensor:
    """Return α = 1 − H(P̃) / ln k (…,) in [0, 1] of renormalised top-k probabilities (…, k); Eqs. 8 and 9."""
    entropy: Tensor = torch.special.entr(probs).sum(dim=-1)
    return (1.0 - entropy / math.log(max(probs.shape[-1], 2))).clamp(0.0, 1.0)


def real_depth(alpha: Tensor, max_depth: Tensor, settings: SageSettings) -> Tensor:
    """Return D(α) = D_min + α (D_max − D_min) (b,), Eq. 10, not rounded; `alpha` and `max_depth` (D_max) are (b,)."""
    return settings.min_depth + alpha * (max_depth - settings.min_depth)


def whole_depth(depth: Tensor) -> Tensor:
    """Round a real depth D to levels; halves are rounded up."""
    return (depth + 0.5).floor().long()


def real_width(alpha: Tensor, settings: SageSettings) -> Tensor:
    """Return W(α) = W_min + (1 − α) (W_max − W_min), Eq. 11, not rounded."""
    return settings.min_width + (1.0 - alpha) * (settings.max_width - settings.min_width)


def level_width(width: Tensor, level: int, parent_probability: Tensor) -> Tensor:
    """Return the maximum number of children on `level` (1: children of the root): W · (1/l) · (0.5 + P_parent), Eq. 12.

    In the paper, the decay begins "beyond the first level". Without at least one child, it would end every tree at
    depth 3.
    """
    if level > 1:
        width = width / level * (0.5 + parent_probability)
    else:
        width = width.expand_as(parent_probability)
    return (width + 0.5).floor().long().clamp_min(1)


def level_threshold(level: int, depth: Tensor, settings: SageSettings) -> Tensor:
    """Return θ_l = 0.1 · l / D(α), with D not rounded: a node needs a larger probability to be in the tree or, if
    `threshold_gates` is "expansion", to have children."""
    return settings.threshold_scale * level / depth


def bounded_depth(max_depth: Tensor, mean_accepted: Tensor, is_full: Tensor, settings: SageSettings) -> Tensor:
    """Return D_max (b,) after a step: −1 if `mean_accepted` is below `history_low`, +1 if it is above `history_high`.

    `mean_accepted` (b,) does not count the target's own token; rows whose window is not full (`is_full`, b) keep D_max.
    """
    step = (mean_accepted > settings.history_high).long() - (mean_accepted < settings.history_low).long()
    moved = (max_depth + step).clamp(settings.min_depth, settings.depth_cap)
    return torch.where(is_full, moved, max_depth)
