"""Computes one layer's attention by a tree kernel and under one mask, from the same random states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.backends.attention import AttentionStep, ancestors, tree_mask
from models.backends.cache import RaggedCache
from models.backends.cuda.tree_attention import TreeAttention, TreeKernel

CAPACITY = 40
CHAIN, BUSH, FOREST = [-1, 0, 1, 2], [-1, 0, 0, 1, 1, 2], [-1, 0, -1, 2]


def both_ways(
    kernel: TreeKernel,
    lens: list[int],
    visible: Tensor,
    offset: int = 0,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
    head_size: int = 8,
    capacity: int = CAPACITY,
) -> tuple[Tensor, Tensor]:
    """Attention outputs (r, N, H, D_h) of a kernel, on the device of `visible`, and of one mask in fp32."""
    device = visible.device
    generator = torch.Generator().manual_seed(sum(lens) + offset)
    num_rows, num_nodes, _ = visible.shape
    num_heads, num_key_heads = heads

    def states(num: int, length: int) -> Tensor:
        # Projections give (r, N, H, D_h), which attention reads transposed.
        made = torch.randn(num_rows, length, num, head_size, generator=generator).mul(1.5).to(device, dtype)
        return made.transpose(1, 2)

    # Positions behind the scratch ones keep their former content, which must not be read.
    cache = RaggedCache(num_rows + 1, capacity, 1, device)
    every = torch.arange(capacity + 1, device=device).repeat(num_rows, 1)
    long = torch.tensor(lens, device=device)
    # The rows of a step need not be the first of the cache, nor in order.
    rows = torch.arange(num_rows, 0, -1, device=device)
    cache.write(0, rows, every, states(num_key_heads, capacity + 1), states(num_key_heads, capacity + 1))
    query, key, value = (states(num, num_nodes) for num in (num_heads, num_key_heads, num_key_heads))
    columns = (long[:, None] + offset + torch.arange(num_nodes, device=device)).clamp_max(capacity)
    trees = TreeAttention(kernel, long.to(torch.int32), visible.to(torch.uint8).contiguous())
    step = AttentionStep(cache, rows, columns, None, capacity, None, kernel=trees)
    got = trees.attend(0, query, key, value, step, scale)
    mask = tree_mask(long, visible, capacity)
    repeated = (
        memory[rows, :, :capacity].repeat_interleave(num_heads // num_key_heads, 1).float() for memory in cache.layer(0)
    )
    expected = F.scaled_dot_product_attention(query.float(), *repeated, attn_mask=mask, scale=scale)
    assert got.dtype == dtype
    return got, expected.transpose(1, 2)


def tree(parents: list[int], num_rows: int) -> Tensor:
    """Return the attention mask between the nodes of one tree, (r, N, N), equal in all rows."""
    return ancestors(torch.tensor(parents).repeat(num_rows, 1))
