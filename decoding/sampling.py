"""Processes logits per row and node: logits processors, temperature, top-k, top-p and min-p.

Order of operations and handling of ties are as in transformers' logits processors, so plain decoding equals `generate`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.processors import RowProcessors
from decoding.tree import NO_TOKEN

COLDEST = 1e-30
"""Minimum temperature: division by a smaller one overflows fp32."""


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of the b active rows on the device, and host flags for the features that any row uses.

    `temperature` (b,) is 0 for greedy rows; `top_k` (b,) is 0, `top_p` (b,) and `penalty` (b,) are 1 if off. `seen`
    (b, V) marks the tokens of prompt and output, None without penalties. `max_top_k` is the largest of sampled rows.
    `min_p` (b,) is 0 if off, None if no sampled row has it; `processors` are None if no row has any.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    penalty: Tensor
    seen: Tensor | None
    any_sampled: bool
    max_top_k: int
    any_top_p: bool
    min_p: Tensor | None = None
    processors: RowProcessors | None = None

    @property
    def reads_path(self) -> bool:
        """Whether logits depend on the tokens before them."""
        return self.seen is not None or self.processors is not None

    def replay_key(self) -> Hashable:
        """Return the host state that the kernels of `process_logits` depend on."""
        features = None if self.processors is None else self.processors.features
        options = (self.seen is not None, self.min_p is not None, features)
        return self.any_sampled, self.max_top_k, self.any_top_p, *options

    @property
    def is_sampled(self) -> Tensor:
        """Mask (b,) of the rows that sample instead of taking the argmax."""
        return self.temperature > 0


def process_logits(logits: Tensor, rows: RowSampling, path: Tensor | None = None) -> Tensor:
    """Convert logits (b, N, V) to fp32 logits of the sampled distribution, −inf for removed tokens.

    `path` (b, N, P) are the drafts up to and including each node, `NO_TOKEN` after them; None if there are no drafts.
    Greedy rows are processed, but neither scaled nor filtered.
    """
    out = logits.float()
    if rows.reads_path:
        out = _process(out, rows, out.new_empty((*out.shape[:2], 0), dtype=torch.long) if path is None else path)
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
    if rows.min_p is not None:
        probs = out.softmax(dim=-1)
        least = torch.where(sampled, rows.min_p, 0.0)[:, None, None] * probs.amax(dim=-1, keepdim=True)
        out = out.masked_fill(probs < least, -torch.inf)
    return out


def _process(out: Tensor, rows: RowSampling, path: Tensor) -> Tensor:
    processors = rows.processors
    if processors is not None:
        out = processors.adjust(out, path)
    if rows.seen is not None:
        # Counts are added, because a token may be on the path and at its padding.
        count = torch.zeros_like(out).scatter_add(-1, path.clamp_min(0), (path != NO_TOKEN).to(out.dtype))
        penalty = rows.penalty[:, None, None]
        penalised = torch.where(out < 0, out * penalty, out / penalty)
        out = torch.where(rows.seen[:, None] | (count > 0), penalised, out)
    return out if processors is None else processors.force(out, path)


def perturb(processed_logits: Tensor, noise: Tensor | None, rows: RowSampling) -> Tensor:
    """Add Gumbel `noise` (b, N or 1, V) to `processed_logits` (b, N, V) on sampled rows; the argmax is a sample."""
    if noise is None:
        return processed_logits
    return processed_logits + noise * rows.is_sampled[:, None, None]
