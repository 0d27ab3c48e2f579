"""Sum the attention that the tokens of prompts receive during a prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from models.backends.mask_rules import PLAIN, LayerRule


class AttentionProbe:
    """Sum the attention weights of the marked `queries` (r, L) to each KV position over the layers of one prefill."""

    QUERY_CHUNK = 64
    """Queries per chunk; bounds the memory of the attention weights."""

    def __init__(self, queries: Tensor) -> None:
        self.queries = queries
        self.total = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)
        self.num_added = 0

    def add(
        self,
        query: Tensor,
        key: Tensor,
        scaling: float | None,
        rule: LayerRule = PLAIN,
        groups: Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Add the attention of one layer: `query` (r, H, L, D_h), `key` (r, H_kv, L, D_h); see `attend_prompt`."""
        _, num_heads, length, head_dim = query.shape
        scale = head_dim**-0.5 if scaling is None else scaling
        keys = key.repeat_interleave(num_heads // key.shape[1], dim=1).float()
        column = torch.arange(length, device=query.device)
        for start in range(0, length, self.QUERY_CHUNK):
            some = query[:, :, start : start + self.QUERY_CHUNK].float()
            row = column[start : start + self.QUERY_CHUNK]
            scores = some @ keys.transpose(2, 3) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores = scores.masked_fill(~rule.prompt_mask(row, column, groups), -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=3)
            marked = self.queries[:, None, start : start + self.QUERY_CHUNK, None].to(scores.device)
            weights = scores.softmax(-1)[..., :length]
            self.total += (weights * marked).sum(dim=(1, 2)).to(self.total.device)
        self.num_added += num_heads

    def mean(self) -> Tensor:
        """Return the mean weight over layers, heads and marked queries, (r, L)."""
        return self.total / (self.num_added * self.queries.sum(1, keepdim=True).clamp_min(1))
