"""Implements tree attention with explicit scores, as the reference of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from models.backends.attention import tree_mask


def plain(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, lens: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """See `models.backends.cuda.tree_attention.TreeKernel`."""
    group = query.shape[1] // keys.shape[1]
    # (r, P, H_kv, C, D_h) → (r, H_kv, P · C, D_h)
    rows = (memory[blocks.long()].transpose(1, 2).flatten(2, 3) for memory in (keys, values))
    read, mixed = (memory.repeat_interleave(group, dim=1).float() for memory in rows)
    mask = tree_mask(lens.long(), visible.bool(), read.shape[2])
    # Positions that no node sees may hold NaN, and 0 · NaN is NaN.
    mixed = mixed.masked_fill(~mask.any(dim=2)[..., None], 0.0)
    scores = (query.float() @ read.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    # Where nothing is seen every weight is 0, and not 0 / 0.
    weights = (scores - scores.amax(dim=-1, keepdim=True).clamp_min(-1e30)).exp()
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-30)
    return (weights @ mixed).to(query.dtype).transpose(1, 2)
