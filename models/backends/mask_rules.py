"""Define which KV positions a layer's queries read besides causality: windows, chunks and blocks of tokens.

A layer has one rule. Query position q reads key position k if all of these hold:

    causal or block     k <= q, or both tokens are in one block (`in_blocks`; prompts only)
    window w            k > q - w, which cuts backwards inside a block, too
    chunk c             k // c == q // c

Positions count the tokens of a row from 0; they are not rotary positions. A node of a draft tree at depth d has
position `lens` + d, and its ancestors have the positions before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HARMLESS = frozenset(
    {"dropout", "scaling", "is_causal", "position_ids", "use_cache", "cache_position", "output_attentions"}
    | {"output_hidden_states", "output_router_logits", "return_dict", "deterministic"}
)
"""Keyword arguments of attention that do not change which positions a token reads, or with which weights."""
ATTRIBUTE = "layer_rules"
"""Attribute of a decoder with the rules of its layers."""


@dataclass(frozen=True)
class LayerRule:
    """Rule of one layer; the default is causal attention over all earlier positions.

    `window` and `chunk` count positions. `in_blocks` is whether tokens of one block of a prompt read each other.
    `has_softcap` and `has_sinks` are whether the layer caps its scores and has attention sinks; their values are
    keyword arguments of attention. `owner` is the layer whose K and V this layer reads, None if it has its own.
    """

    window: int | None = None
    chunk: int | None = None
    in_blocks: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    owner: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether positions alone decide, and all earlier ones are read."""
        return self.window is None and self.chunk is None and not self.in_blocks

    @property
    def is_plain(self) -> bool:
        """Whether the layer is causal attention over its own K and V, without caps and sinks."""
        return self.is_causal and not self.has_softcap and not self.has_sinks and self.owner is None

    def is_causal_within(self, num_positions: int) -> bool:
        """Return whether rows of up to `num_positions` positions without blocks are read causally."""
        return all(size is None or size >= num_positions for size in (self.window, self.chunk))

    def reads(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether window and chunk let `queries` read `keys`, int64 positions that broadcast; bool."""
        reads = torch.ones((), dtype=torch.bool, device=keys.device)
        if self.window is not None:
            reads = reads & (keys > queries - self.window)
        if self.chunk is not None:
            reads = reads & (keys // self.chunk == queries // self.chunk)
        return reads

    def first_read(self, queries: Tensor) -> Tensor:
        """Return the first position that each of `queries` reads; both are int64."""
        first = torch.zeros_like(queries)
        if self.window is not None:
            first = torch.maximum(first, queries - self.window + 1)
        if self.chunk is not None:
            first = torch.maximum(first, queries // self.chunk * self.chunk)
        return first

    def first_number(self, query: int) -> int:
        """Return the first position that the position `query` reads."""
        return int(self.first_read(torch.tensor(query)))

    def prompt_mask(self, queries: Tensor, keys: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return which `keys` (m,) the `queries` (n,) of prompts read, (r, 1, n, m), or (1, 1, n, m) without blocks.

        `groups` (r, L) are equal for tokens of one block and different for others.
        """
        visible = keys <= queries[:, None]
        if self.in_blocks and groups is not None:
            visible = visible | (groups[:, queries, None] == groups[:, None, keys])
        visible = visible & self.reads(queries[:, None], keys)
        return visible.view(-1, 1, *visible.shape[-2:])


PLAIN = LayerRule()


@dataclass(frozen=True)
class TreePositions:
    """Positions of the N new nodes of a tree forward and of the M scratch positions that they may read.

    `queries` (r, N) are positions of nodes; `scratch` (r, N, M) are those of the scratch positions as their readers
    count them: each ancestor is one position before its child. Unread scratch positions have arbitrary numbers.
    """

    queries: Tensor
    scratch: Tensor

    @classmethod
    def of(cls, lens: Tensor, depth: Tensor, visible: Tensor) -> TreePositions:
        """Create them for rows with `lens` (r,) positions, nodes of `depth` (r, N), and `visible` (r, N, M)."""
        queries = lens[:, None] + depth
        # Ancestors have smaller scratch numbers, and a node itself is the last that it reads.
        behind = visible.long().flip(2).cumsum(2).flip(2) - 1
        return cls(queries, queries[:, :, None] - behind)

    def mask(self, rule: LayerRule, lens: Tensor, visible: Tensor, window: int) -> Tensor:
        """Return which of the first `window` KV positions nodes read under `rule`, bool (r, 1, N, window)."""
        num_scratch = visible.shape[2]
        column = torch.arange(window, device=lens.device)
        offset = column - lens[:, None]  # (r, window), < 0 is committed
        index = offset.clamp(0, num_scratch - 1)[:, None].expand(-1, visible.shape[1], -1)
        inside = ((offset >= 0) & (offset < num_scratch))[:, None]
        committed = (offset < 0)[:, None] & rule.reads(self.queries[:, :, None], column)
        scratch = self.visible(rule, visible).gather(2, index) & inside
        return (committed | scratch)[:, None]

    def visible(self, rule: LayerRule, visible: Tensor) -> Tensor:
        """Return which scratch positions of `visible` (r, N, M) nodes read under `rule`."""
        return visible & rule.reads(self.queries[:, :, None], self.scratch)

    def first_read(self, rule: LayerRule) -> Tensor:
        """Return the first committed position that each node reads under `rule`, int32 (r, N)."""
        return rule.first_read(self.queries).to(torch.int32)


def rules_of(decoder: nn.Module) -> tuple[LayerRule, ...]:
    """Return the rules of the layers of a decoder; empty if all are plain."""
    rules: tuple[LayerRule, ...] = getattr(decoder, ATTRIBUTE, ())
    return rules


def set_rules(decoder: nn.Module, rules: Sequence[LayerRule]) -> None:
    """Store the rules of the layers of a decoder, which its KV caches and runners use."""
    setattr(decoder, ATTRIBUTE, () if all(rule.is_plain for rule in rules) else tuple(rules))


def masked_rules(rules: Sequence[LayerRule]) -> list[LayerRule]:
    """Return the different rules that hide earlier positions, so that decoding steps need a mask of their own."""
    return list(dict.fromkeys(tree_rule(rule) for rule in rules if not tree_rule(rule).is_causal))


def tree_rule(rule: LayerRule) -> LayerRule:
    """Return the window and chunk of a rule alone, which decide for nodes of trees: they are in no block."""
    return LayerRule(rule.window, rule.chunk)


def refuse_unknown(keywords: dict[str, Any]) -> None:
    """Raise TypeError for a keyword argument of attention that the engine does not know and that is not None."""
    unknown = sorted(name for name, value in keywords.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise TypeError(f"attention has arguments that the engine does not support: {', '.join(unknown)}")
