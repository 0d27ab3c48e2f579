"""Tree attention on a GPU: one kernel reads committed positions by length and scratch positions under a tree's mask.

Shapes: r rows, H_kv key heads, H query heads, N nodes, M scratch positions, P blocks of C positions, D_h head size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from models.backends.attention import AttentionStep

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 512
"""Largest head: 256 numbers in half precision. Blocks of larger ones exceed the shared memory of smaller GPUs."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_CAPABILITY = (8, 0)
"""Lowest compute capability (Ampere) with tensor cores for bfloat16."""

TreeKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""Query (r, H, N, D_h), cached K and V (blocks, H_kv, C, D_h), the blocks (r, P) int32 of each row, lens (r,) int32,
visible (r, N, M) uint8, scale → attention output (r, N, H, D_h). Row i attends to its first `lens[i]` positions, and
node n to scratch position `lens[i]` + j if `visible[i, n, j]` is not 0; nodes that see nothing get zeros."""


@dataclass(frozen=True)
class TreeAttention:
    """Attention of the nodes of one forward in all layers; see `TreeKernel` for `blocks`, `lens` and `visible`."""

    kernel: TreeKernel
    blocks: Tensor
    lens: Tensor
    visible: Tensor

    def on(self, device: torch.device) -> TreeAttention:
        """Return a copy for layers on another device."""
        blocks, lens, visible = (part.to(device) for part in self.changing)
        return replace(self, blocks=blocks, lens=lens, visible=visible)

    def idle(self, num_rows: int) -> TreeAttention:
        """Return buffers for `num_rows` rows whose nodes see nothing."""
        return TreeAttention(self.kernel, *(part.new_zeros((num_rows, *part.shape[1:])) for part in self.changing))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, step: AttentionStep, scale: float
    ) -> Tensor:
        """See `models.backends.attention.AttentionKernel`."""
        step.cache.write(layer, step.index, key, value)
        return self.kernel(query, *step.cache.layer(layer), self.blocks, self.lens, self.visible, scale)

    @property
    def changing(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors (r, …) that differ between forwards of one size; CUDA graphs copy them into static buffers."""
        return self.blocks, self.lens, self.visible


def kernel_for(keys: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> TreeKernel | None:
    """Return the kernel for a KV cache with these `keys` and `values`; None if attention must use a mask instead."""
    memories = [memory for memory in (*keys, *values) if memory is not None]
    # Keys and values share their offsets.
    are_alike = len({memory.shape for memory in memories}) == 1 and len(memories) == 2 * len(keys)
    return _load() if are_alike and all(map(_is_supported, memories)) else None


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
