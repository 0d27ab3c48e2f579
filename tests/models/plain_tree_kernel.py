"""Implements tree attention with explicit scores, as the reference of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from models.backends.attention import tree_mask


def plain(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    lens: Tensor,
    visible: Tensor,
    scale: float,
    first: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `models.backends.cuda.tree_attention.TreeKernel`."""
    group = query.shape[1] // keys.shape[1]
    # (r, P, H_kv, C, D_h) → (r, H_kv, P · C, D_h)
    rows = (memory[blocks.long()].transpose(1, 2).flatten(2, 3) for memory in (keys, values))
    read, mixed = (memory.repeat_interleave(group, dim=1).float() for memory in rows)
    mask = tree_mask(lens.long(), visible.bool(), read.shape[2])
    if first is not None:
        column = torch.arange(read.shape[2], device=mask.device)
        is_committed = column < lens[:, None, None]
        mask = mask & ~(is_committed & (column < first[:, :, None]))[:, None]
    # Positions that no node sees may hold NaN, and 0 · NaN is NaN.
    mixed = mixed.masked_fill(~mask.any(dim=2)[..., None], 0.0)
    scores = query.float() @ read.transpose(2, 3) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=3)
        mixed = torch.cat([mixed, mixed.new_zeros(mixed[:, :, :1].shape)], dim=2)
    # Where nothing is seen every weight is 0, and not 0 / 0.
    weights = (scores - scores.amax(dim=-1, keepdim=True).clamp_min(-1e30)).exp()
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-30)
    return (weights @ mixed).to(query.dtype).transpose(1, 2)
