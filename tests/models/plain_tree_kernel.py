"""Implements tree attention with explicit scores, as the reference of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from models.backends.attention import tree_mask


def plain(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, lens: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """See `models.backends.cuda.tree_attention.TreeKernel`."""
    group = query.shape[1] // keys.shape[1]
    read, mixed = (memory[rows].repeat_interleave(group, dim=1).float() for memory in (keys, values))
    mask = tree_mask(lens.long(), visible.bool(), keys.shape[2])
    scores = (query.float() @ read.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    # Where nothing is seen every weight is 0, and not 0 / 0.
    weights = (scores - scores.amax(dim=-1, keepdim=True).clamp_min(-1e30)).exp()
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-30)
    return (weights @ mixed).to(query.dtype).transpose(1, 2)
