"""Tree attention on a GPU: one kernel reads committed positions by length and scratch positions under a tree's mask.

Shapes: r rows, H_kv key heads, H query heads, N nodes, M scratch positions, P blocks of C positions, D_h head size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.backends.attention import AttentionStep
from models.backends.base import TreeNodes
from models.backends.mask_rules import LayerRule, TreePositions, masked_rules, tree_rule

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 512
"""Largest head: 256 numbers in half precision. Blocks of larger ones exceed the shared memory of smaller GPUs."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_CAPABILITY = (8, 0)
"""Lowest compute capability (Ampere) with tensor cores for bfloat16."""

TreeKernel = Callable[..., Tensor]
"""Query (r, H, N, D_h), cached K and V (blocks, H_kv, C, D_h), the blocks (r, P) int32 of each row, lens (r,) int32,
visible (r, N, M) uint8, scale → attention output (r, N, H, D_h). Row i attends to its first `lens[i]` positions, and
node n to scratch position `lens[i]` + j if `visible[i, n, j]` is not 0; nodes that see nothing get zeros.

Three more arguments are for layers with a rule: with `first` (r, N) int32, node n attends to no position before
`first[i, n]`, and blocks of positions before those of all nodes are not read; with `softcap` c > 0, scores are
c · tanh(scores / c); `sinks` (H,) are scores of one more key of each head, whose value is zero."""


@dataclass(frozen=True)
class TreeAttention:
    """Attention of the nodes of one forward in all layers; see `TreeKernel` for `blocks`, `lens` and `visible`.

    `ruled` holds `first` and `visible` of rules that hide earlier positions.
    """

    kernel: TreeKernel
    blocks: Tensor
    lens: Tensor
    visible: Tensor
    ruled: Mapping[LayerRule, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, kernel: TreeKernel, nodes: TreeNodes) -> TreeAttention:
        """Create the attention of tree nodes, with the rules of the layers of their cache."""
        ruled = {}
        if rules := masked_rules(nodes.cache.rules):
            places = TreePositions.of(nodes.lens, nodes.depth, nodes.visible)
            ruled = {rule: (places.first_read(rule), _bytes(places.visible(rule, nodes.visible))) for rule in rules}
        lens = nodes.lens.to(torch.int32)
        return cls(kernel, nodes.cache.blocks(nodes.rows), lens, _bytes(nodes.visible), ruled)

    def on(self, device: torch.device) -> TreeAttention:
        """Return a copy for layers on another device."""
        return self._over([part.to(device) for part in self.changing])

    def idle(self, num_rows: int) -> TreeAttention:
        """Return buffers for `num_rows` rows whose nodes see nothing."""
        return self._over([part.new_zeros((num_rows, *part.shape[1:])) for part in self.changing])

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        step: AttentionStep,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `models.backends.attention.AttentionKernel`."""
        rule = step.cache.rule_of(layer)
        if rule.owner is None:
            step.cache.write(layer, step.index, key, value)
        cached = step.cache.layer(layer if rule.owner is None else rule.owner)
        first, visible = self.ruled.get(tree_rule(rule), (None, self.visible))
        if first is None and softcap is None and sinks is None:
            return self.kernel(query, *cached, self.blocks, self.lens, visible, scale)
        return self.kernel(query, *cached, self.blocks, self.lens, visible, scale, first, softcap or 0.0, sinks)

    @property
    def changing(self) -> tuple[Tensor, ...]:
        """Tensors (r, …) that differ between forwards of one size; CUDA graphs copy them into static buffers."""
        return self.blocks, self.lens, self.visible, *(part for parts in self.ruled.values() for part in parts)

    def _over(self, changing: Sequence[Tensor]) -> TreeAttention:
        """Return the same attention over other tensors, in the order of `changing`."""
        blocks, lens, visible, *others = changing
        pairs = zip(others[::2], others[1::2], strict=True)
        return TreeAttention(self.kernel, blocks, lens, visible, dict(zip(self.ruled, pairs, strict=True)))


def _bytes(visible: Tensor) -> Tensor:
    return visible.to(torch.uint8).contiguous()


def kernel_for(keys: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> TreeKernel | None:
    """Return the kernel for a KV cache with these `keys` and `values`; None if attention must use a mask instead."""
    pairs = [(key, value) for key, value in zip(keys, values, strict=True) if key is not None and value is not None]
    # Keys and values of a layer share their offsets; layers may differ.
    are_alike = bool(pairs) and len(pairs) == len(keys) and all(key.shape == value.shape for key, value in pairs)
    return _load() if are_alike and all(_is_supported(memory) for pair in pairs for memory in pair) else None


def _is_supported(memory: Tensor) -> bool:
    """Return whether the kernel supports a layer's cache (rows, H_kv, C, D_h)."""
    return (
        memory.device.type == "cuda"
        and memory.dtype in DTYPES
        and memory.shape[3] * memory.element_size() <= MAX_HEAD_BYTES
        and torch.cuda.get_device_capability(memory.device) >= MIN_CAPABILITY
    )


@functools.cache
def _load() -> TreeKernel | None:
    """Return the kernel as one operation, which a compiled graph does not look into; None without Triton."""
    try:
        # Triton is installed with builds of torch for GPUs only.
        from models.backends.cuda.tree_kernel import tree_attention
    except ImportError as error:
        logger.warning("attention of decoding steps uses a mask, which is slower: %s", error)
        return None
    operation: Any = torch.library.custom_op("draftfleet::tree_attention", tree_attention, mutates_args=())
    operation.register_fake(_empty)

    def run(*given: Any) -> Tensor:
        mixed: Tensor = operation(*given) if torch.compiler.is_compiling() else tree_attention(*given)
        return mixed

    return run


def _empty(query: Tensor, *_: Any) -> Tensor:
    num_rows, num_heads, num_nodes, head_size = query.shape
    return query.new_empty(num_rows, num_nodes, num_heads, head_size)
