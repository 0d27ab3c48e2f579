"""Processes logits per row and node: repetition penalty, temperature, top-k and top-p.

Order of operations and handling of ties are as in transformers' logits processors, so plain decoding equals `generate`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COLDEST = 1e-30
"""Minimum temperature: division by a smaller one overflows fp32."""


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of the b active rows on the device, and host flags for the features that any row uses.

    `temperature` (b,) is 0 for greedy rows; `top_k` (b,) is 0, `top_p` (b,) and `penalty` (b,) are 1 if off. `seen`
    (b, V) marks the tokens of prompt and output, None without penalties. `max_top_k` is the largest of sampled rows.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    penalty: Tensor
    seen: Tensor | None
    any_sampled: bool
    max_top_k: int
    any_top_p: bool

    @property
    def is_sampled(self) -> Tensor:
        """Mask (b,) of the rows that sample instead of taking the argmax."""
        return self.temperature > 0


def warp(logits: Tensor, rows: RowSampling, earlier: Tensor | None, earlier_valid: Tensor | None = None) -> Tensor:
    """Convert logits (b, N, V) to fp32 logits of the sampled distribution, −inf for removed tokens.

    `earlier` (b, N, K) are the uncommitted tokens up to and including each node, for the repetition penalty;
    `earlier_valid` (b, N, K) is False for padding. Greedy rows are penalised, but neither scaled nor filtered.
    """
    out = logits.float()
    if rows.seen is not None:
        out = _penalise(out, rows, earlier, earlier_valid)
    if not rows.any_sampled:
        return out
    sampled = rows.is_sampled
    out = out / torch.where(sampled, rows.temperature.clamp_min(COLDEST), 1.0)[:, None, None]
    if rows.max_top_k:
        # Keep tokens that tie with the k-th, as transformers does.
        filtered = sampled & (rows.top_k > 0)
        best = out.topk(min(rows.max_top_k, out.shape[-1]), dim=-1).values
        k = torch.where(filtered, rows.top_k, 1).clamp_max(best.shape[-1])
        threshold = best.gather(-1, (k - 1)[:, None, None].expand(-1, out.shape[1], 1))
        out = out.masked_fill((out < threshold) & filtered[:, None, None], -torch.inf)
    if rows.any_top_p:
        ordered, index = out.sort(dim=-1, descending=False)
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        keep = torch.where(sampled, rows.top_p, 1.0)[:, None, None]
        remove = (mass <= 1.0 - keep) & (keep < 1.0)
        remove[..., -1].fill_(False)
        out = out.masked_fill(torch.zeros_like(remove).scatter(-1, index, remove), -torch.inf)
    return out


def _penalise(out: Tensor, rows: RowSampling, earlier: Tensor | None, earlier_valid: Tensor | None) -> Tensor:
    assert rows.seen is not None
    seen = rows.seen[:, None].expand_as(out)
    if earlier is not None and earlier.shape[-1] > 0:
        count = torch.zeros_like(out)
        real = torch.ones_like(earlier, dtype=out.dtype) if earlier_valid is None else earlier_valid.to(out.dtype)
        # Counts are added, because a token may occur at a valid and at a padded position.
        seen = seen | (count.scatter_add(-1, earlier, real) > 0)
    penalty = rows.penalty[:, None, None]
    return torch.where(seen, torch.where(out < 0, out * penalty, out / penalty), out)


def perturb(warped: Tensor, noise: Tensor | None, rows: RowSampling) -> Tensor:
    """Add Gumbel `noise` (b, N or 1, V) to `warped` (b, N, V) on sampled rows; the argmax is then a sample."""
    if noise is None:
        return warped
    return warped + noise * rows.is_sampled[:, None, None]
