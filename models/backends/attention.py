"""Attention over ragged rows, plugged into transformers' own attention layers.

Owns the mask arithmetic and the one attention function that target and drafter models run under. Knows nothing of
tokens, sampling or which method asked.

The mask, by example: a row has 3 committed columns; the tree is root 0 with children 1 and 2, and 3 below 1. Node j is
written to column 3 + j. `visible` is ancestors-or-self, and row i of the mask is "all committed columns, then
`visible[i]`":

    node 0:  1 1 1 | 1 0 0 0
    node 1:  1 1 1 | 1 1 0 0
    node 2:  1 1 1 | 1 0 1 0        siblings 1 and 2 never see each other
    node 3:  1 1 1 | 1 1 0 1
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from models.backends.cache import RaggedCache
from models.backends.cpu import attention
from models.backends.cuda.tree_attention import TwoParts, attend_in_parts

IMPLEMENTATION = "draftfleet_ragged"


class AttentionProbe:
    """Adds up, over the layers of one prefill, the attention that the marked `queries` (r, L) pay to each column."""

    QUERY_CHUNK = 64
    """Queries handled at once: full attention weights of a long prompt would not fit."""

    def __init__(self, queries: Tensor) -> None:
        self.queries = queries
        self.total = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)
        self.num_added = 0

    def add(self, query: Tensor, key: Tensor, scaling: float | None) -> None:
        """One layer: `query` (r, H, L, D_h), `key` (r, H_kv, L, D_h), causal."""
        _, num_heads, length, head_dim = query.shape
        scale = head_dim**-0.5 if scaling is None else scaling
        keys = key.repeat_interleave(num_heads // key.shape[1], dim=1).float()
        column = torch.arange(length, device=query.device)
        for start in range(0, length, self.QUERY_CHUNK):
            some = query[:, :, start : start + self.QUERY_CHUNK].float()
            row = column[start : start + self.QUERY_CHUNK]
            scores = (some @ keys.transpose(2, 3) * scale).masked_fill(row[:, None] < column, -torch.inf)
            asked = self.queries[:, None, start : start + self.QUERY_CHUNK, None].to(scores.device)
            self.total += (scores.softmax(-1) * asked).sum(dim=(1, 2)).to(self.total.device)
        self.num_added += num_heads

    def mean(self) -> Tensor:
        """Mean over layers, heads and queries, (r, L)."""
        return self.total / (self.num_added * self.queries.sum(1, keepdim=True).clamp_min(1))


@dataclass(frozen=True)
class AttentionStep:
    """What one forward needs to know about memory: where its r rows write, and what they may read.

    `mask` (r, 1, N, window) is added to the scores: 0 where a node may look and −inf elsewhere, in the type of the
    states; None means a prefill, which is causal over the incoming tokens only. `parts` stands in its place for a step
    on a device that attends in two parts. `in_loops` is a layer that attends by `models.backends.cpu.attention`.
    """

    cache: RaggedCache
    rows: Tensor
    columns: Tensor
    mask: Tensor | None
    window: int
    num_leading_rows: int | None
    probe: AttentionProbe | None = None
    parts: TwoParts | None = None
    in_loops: bool = False
    _elsewhere: dict[torch.device, AttentionStep] = field(default_factory=dict, repr=False, compare=False)

    def on(self, device: torch.device) -> AttentionStep:
        """The same for a layer on another device; made once for all of its layers. Memory and probe stay the same."""
        if device == self.rows.device:
            return self
        if device not in self._elsewhere:
            mask = None if self.mask is None else self.mask.to(device)
            parts = None if self.parts is None else self.parts.on(device)
            rows, columns = self.rows.to(device), self.columns.to(device)
            self._elsewhere[device] = replace(self, rows=rows, columns=columns, mask=mask, parts=parts, _elsewhere={})
        return self._elsewhere[device]


def ancestors(parents: Tensor) -> Tensor:
    """Ancestors-or-self of every node: `parents` (b, N), −1 for a node without one, → bool (b, N, N).

    By doubling: a node that knows its first m ancestors, and who the m-th is, learns the next m from that one. So 65
    nodes take 7 gathers, however deep the tree.
    """
    b, num_nodes = parents.shape
    itself = torch.arange(num_nodes, device=parents.device)
    # Beyond its oldest ancestor a line stays where it is, which adds nothing new.
    jump = torch.where(parents >= 0, parents, itself)
    reach = (itself[:, None] == itself).expand(b, -1, -1)
    for _ in range((num_nodes - 1).bit_length()):
        reach = reach | reach.gather(1, jump[:, :, None].expand(-1, -1, num_nodes))
        jump = jump.gather(1, jump)
    return reach


def tree_mask(lens: Tensor, visible: Tensor, window: int) -> Tensor:
    """Which columns each node reads: `lens` (r,), `visible` (r, N, M) of scratch columns → bool (r, 1, N, window)."""
    _, num_nodes, num_scratch = visible.shape
    offset = torch.arange(window, device=lens.device)[None] - lens[:, None]  # (r, window), < 0 is committed
    inside = (offset >= 0) & (offset < num_scratch)
    index = offset.clamp(0, num_scratch - 1)[:, None].expand(-1, num_nodes, -1)
    scratch = visible.gather(2, index) & inside[:, None]
    return ((offset < 0)[:, None] | scratch)[:, None]


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is True where a node may look → what is added to the scores; made once and not in every layer."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    lanes: AttentionStep | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention contract: write K and V (r, H_kv, N, D_h), return the mixed values (r, N, H, D_h)."""
    assert lanes is not None, "this model is owned by an engine: call it through models.kv.lanes, not directly"
    layer: int = module.layer_idx  # type: ignore[assignment]
    num_rows, num_heads, num_nodes, head_dim = query.shape
    scale = head_dim**-0.5 if scaling is None else scaling
    if lanes.in_loops:
        keys, values = lanes.cache.layer(layer)
        places = (lanes.rows, lanes.columns)
        return attention.OPERATION(query, key, value, keys, values, *places, lanes.mask, scale), None
    lanes.cache.write(layer, lanes.rows, lanes.columns, key, value)
    if lanes.parts is not None:
        keys, values = lanes.cache.layer(layer)
        return attend_in_parts(query, key, value, lanes.rows, keys, values, lanes.parts, scale).transpose(1, 2), None
    if lanes.mask is None:
        if lanes.probe is not None:
            lanes.probe.add(query, key, scaling)
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return mixed.transpose(1, 2), None
    keys, values = lanes.cache.read(layer, lanes.rows, lanes.num_leading_rows, lanes.window)
    groups = num_heads // keys.shape[1]
    mask = lanes.mask
    if groups > 1:
        # Query heads of one group become extra query rows: K and V are read once instead of being repeated.
        query = query.reshape(num_rows, keys.shape[1], groups * num_nodes, head_dim)
        mask = mask.repeat(1, 1, groups, 1)
    mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return mixed.reshape(num_rows, num_heads, num_nodes, values.shape[3]).transpose(1, 2), None


# No mask function is registered under this name, so transformers builds no mask of its own.
AttentionInterface.register(IMPLEMENTATION, attend)
