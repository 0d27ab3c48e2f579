"""From logits to the distribution that is sampled: repetition penalty, temperature, top-k, top-p, per row and node.

Order and tie rules are those of transformers' logits processors, so that a plain run equals `generate`. Knows nothing
of trees beyond "these tokens came before this node".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COLDEST = 1e-30
"""Temperatures below count as this one, which is as good as greedy: fp32 has no room for logits divided by less."""


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of the b active rows, on the device, and which of them any row uses, on the host.

    `temperature` (b,) is 0 for greedy rows, `top_k` (b,) 0 where off, `top_p` (b,), `penalty` (b,). `seen` (b, V) marks
    the tokens of prompt and output; None when no row has a penalty. `max_top_k` is the largest top-k, 0 where all are
    off.
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
        """Rows that draw instead of taking the best token, (b,) bool."""
        return self.temperature > 0


def warp(logits: Tensor, rows: RowSampling, earlier: Tensor | None, earlier_valid: Tensor | None = None) -> Tensor:
    """Logits (b, N, V) → logits of the sampled distribution, fp32, −inf where a filter removes a token.

    `earlier` (b, N, K) are the tokens between the last committed one and each node (the node included), which the
    repetition penalty has to count too; `earlier_valid` (b, N, K) says which are real. Greedy rows are penalised but
    neither scaled nor filtered.
    """
    out = logits.float()
    if rows.seen is not None:
        out = _penalise(out, rows, earlier, earlier_valid)
    if not rows.any_sampled:
        return out
    sampled = rows.is_sampled
    out = out / torch.where(sampled, rows.temperature.clamp_min(COLDEST), 1.0)[:, None, None]
    if rows.max_top_k:
        # Ties with the k-th stay, as in transformers. Finding the best few takes a tenth of the time of sorting all.
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
        remove[..., -1] = False
        out = out.masked_fill(torch.zeros_like(remove).scatter(-1, index, remove), -torch.inf)
    return out


def _penalise(out: Tensor, rows: RowSampling, earlier: Tensor | None, earlier_valid: Tensor | None) -> Tensor:
    assert rows.seen is not None
    seen = rows.seen[:, None].expand_as(out)
    if earlier is not None and earlier.shape[-1] > 0:
        count = torch.zeros_like(out)
        real = torch.ones_like(earlier, dtype=out.dtype) if earlier_valid is None else earlier_valid.to(out.dtype)
        # Added, not set: the same token may stand at a real and at a padded place.
        seen = seen | (count.scatter_add(-1, earlier, real) > 0)
    penalty = rows.penalty[:, None, None]
    return torch.where(seen, torch.where(out < 0, out * penalty, out / penalty), out)


def perturb(warped: Tensor, noise: Tensor | None, rows: RowSampling) -> Tensor:
    """Scores whose maximum is the draw: `warped` (b, N, V) plus Gumbel `noise` (b, N or 1, V) on sampled rows.

    argmax(log p + g) is an exact draw from p (Gumbel-max); a constant such as the normaliser does not change it.
    """
    if noise is None:
        return warped
    return warped + noise * rows.is_sampled[:, None, None]
