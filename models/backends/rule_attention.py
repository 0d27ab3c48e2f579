"""Attention of layers with a rule, in plain torch: prompts under windows, chunks and blocks, score caps and sinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.backends.mask_rules import LayerRule

QUERY_CHUNK = 512
"""Queries of a prompt for which one mask is made; bounds the memory of masks and scores."""


def attend_prompt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: LayerRule,
    groups: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention output (r, L, H, D_v) of prompts, with `query` (r, H, L, D_h), `key` and `value`
    (r, H_kv, L, D).

    `groups` (r, L) are the blocks of tokens, see `LayerRule.prompt_mask`. Only keys that a chunk of queries may read
    are computed. `softcap` and `sinks` (H,) are as for `weigh`.
    """
    length = query.shape[2]
    has_blocks = rule.in_blocks and groups is not None
    parts = []
    for start in range(0, length, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, length)
        first, last = rule.first_number(start), length if has_blocks else end
        queries = torch.arange(start, end, device=query.device)
        mask = rule.prompt_mask(queries, torch.arange(first, last, device=query.device), groups)
        given = query[:, :, start:end], key[:, :, first:last], value[:, :, first:last]
        parts.append(weigh(*given, mask, scale, softcap, sinks))
    return torch.cat(parts, dim=2).transpose(1, 2)


def weigh(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention output (r, H, N, D_v) under a `mask` (r or 1, 1, N, M), bool or added to the scores.

    With `softcap` c, scores are c · tanh(scores / c) before the mask (Gemma 2). `sinks` (H,) are scores of one more
    key per head with a value of zeros (GPT-OSS). Scores and weights are in fp32.
    """
    if softcap is None and sinks is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    groups = query.shape[1] // key.shape[1]
    keys, values = (part.repeat_interleave(groups, dim=1).float() for part in (key, value))
    scores = (query.float() @ keys.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        columns = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, columns], dim=3).softmax(3)[..., :-1]
    else:
        weights = scores.softmax(3)
    return (weights @ values).to(value.dtype)
