"""Computes one layer's attention by a tree kernel and under one mask, from the same random states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.backends.attention import AttentionStep, ancestors, tree_mask
from models.backends.cache import RaggedCache
from models.backends.cuda.tree_attention import TreeAttention, TreeKernel
from models.backends.pages import PagedCache, num_pages_of

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
    is_paged: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention outputs (r, N, H, D_h) of a kernel, on the device of `visible`, and of one mask in fp32.

    With `is_paged`, the rows hold pages in no order, and NaN is in the pages that are free and in page 0.
    """
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
    if is_paged:
        cache = paged(num_rows + 1, capacity, [length + visible.shape[2] for length in lens], device)
    every = torch.arange(capacity + 1, device=device).repeat(num_rows, 1)
    long = torch.tensor(lens, device=device)
    # The rows of a step need not be the first of the cache, nor in order.
    rows = torch.arange(num_rows, 0, -1, device=device)
    filled = states(num_key_heads, capacity + 1), states(num_key_heads, capacity + 1)
    cache.write(0, cache.locate(rows, every), *filled)
    if isinstance(cache, PagedCache):
        for memory in cache.layer(0):
            memory[torch.tensor([0, *cache.pool._free], device=device)] = torch.nan
    query, key, value = (states(num, num_nodes) for num in (num_heads, num_key_heads, num_key_heads))
    columns = (long[:, None] + offset + torch.arange(num_nodes, device=device)).clamp_max(capacity)
    seen = visible.to(torch.uint8).contiguous()
    trees = TreeAttention(kernel, cache.blocks(rows), long.to(torch.int32), seen)
    step = AttentionStep(cache, rows, columns, None, capacity, None, kernel=trees)
    got = trees.attend(0, query, key, value, step, scale)
    mask = tree_mask(long, visible, capacity)
    # The oracle holds every position of a row side by side, with the new nodes where they were written.
    here = torch.arange(num_rows, device=device)[:, None]
    for memory, new in zip(filled, (key, value), strict=True):
        memory.transpose(1, 2)[here, columns] = new.transpose(1, 2)
    repeated = (memory[:, :, :capacity].repeat_interleave(num_heads // num_key_heads, 1).float() for memory in filled)
    expected = F.scaled_dot_product_attention(query.float(), *repeated, attn_mask=mask, scale=scale)
    assert got.dtype == dtype
    return got, expected.transpose(1, 2)


def paged(num_rows: int, capacity: int, positions: list[int], device: torch.device) -> PagedCache:
    """Return a cache whose rows 1 … n hold pages for `positions`, in the order of rows n … 1 and in no order within."""
    cache = PagedCache(num_rows, capacity, 1, device, num_pages_of(capacity) * num_rows + 3)
    generator = torch.Generator().manual_seed(sum(positions))
    pages = torch.randperm(cache.pool.num_pages, generator=generator).add(1).tolist()
    cache.pool._free = pages
    for row, number in zip(range(len(positions), 0, -1), positions, strict=True):
        taken = cache.pool.take(num_pages_of(min(number, capacity)))
        assert taken is not None
        cache.assign(torch.tensor([row], device=device), torch.tensor([cache.entry_of(taken)], device=device))
    return cache


def tree(parents: list[int], num_rows: int) -> Tensor:
    """Return the attention mask between the nodes of one tree, (r, N, N), equal in all rows."""
    return ancestors(torch.tensor(parents).repeat(num_rows, 1))
