"""Implements the first part of two-part attention with explicit scores, as the reference of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from models.backends.cuda.tree_attention import TwoParts


def plain(query: Tensor, keys: Tensor, values: Tensor, parts: TwoParts, scale: float) -> tuple[Tensor, Tensor]:
    """See `models.backends.cuda.tree_attention.FirstPart`."""
    scores = query.float() @ keys.float().transpose(2, 3) * scale
    is_there = torch.arange(keys.shape[2], device=keys.device) < parts.lens[:, :, None, None]
    total = scores.masked_fill(~is_there, -torch.inf).logsumexp(dim=-1)
    # Where no column is there every weight is 0, and not 0 / 0.
    weights = (scores - total.clamp_min(-1e30)[..., None]).masked_fill(~is_there, -torch.inf).exp()
    return (weights @ values.float()).to(query.dtype), total
