"""Computes one layer's attention in two parts and under one mask, from the same random states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.backends.attention import ancestors, tree_mask
from models.backends.cache import RaggedCache
from models.backends.cuda.tree_attention import FirstPart, attend_in_parts, split
from tests.models.plain_first_part import plain

CAPACITY = 40
CHAIN, BUSH, FOREST = [-1, 0, 1, 2], [-1, 0, 0, 1, 1, 2], [-1, 0, -1, 2]


def both_ways(
    lens: list[int],
    visible: Tensor,
    offset: int,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
    first: FirstPart = plain,
    head_size: int = 8,
) -> tuple[Tensor, Tensor]:
    """Mixed values (r, H, N, D_h) in two parts, on the device of `visible`, and under one mask in fp32."""
    device = visible.device
    generator = torch.Generator().manual_seed(sum(lens) + offset)
    num_rows, num_nodes, _ = visible.shape
    num_heads, num_key_heads = heads

    def states(num: int, length: int) -> Tensor:
        return torch.randn(num_rows, num, length, head_size, generator=generator).mul(1.5).to(device, dtype)

    # Columns behind the scratch ones keep their former content, which must not be read.
    cache = RaggedCache(num_rows + 1, CAPACITY, 1, device)
    every = torch.arange(CAPACITY + 1, device=device).repeat(num_rows, 1)
    rows, long = torch.arange(num_rows, device=device), torch.tensor(lens, device=device)
    cache.write(0, rows, every, states(num_key_heads, CAPACITY + 1), states(num_key_heads, CAPACITY + 1))
    query, key, value = (states(num, num_nodes) for num in (num_heads, num_key_heads, num_key_heads))
    cache.write(0, rows, long[:, None] + offset + torch.arange(num_nodes, device=device), key, value)
    keys, values = cache.layer(0)
    parts = split(first, long, visible, offset, keys, num_heads)
    got = attend_in_parts(query, key, value, rows, keys, values, parts, scale)
    mask = tree_mask(long, visible, CAPACITY)
    repeated = (
        memory[:num_rows, :, :CAPACITY].repeat_interleave(num_heads // num_key_heads, 1).float()
        for memory in (keys, values)
    )
    expected = F.scaled_dot_product_attention(query.float(), *repeated, attn_mask=mask, scale=scale)
    assert got.dtype == dtype
    return got, expected


def tree(parents: list[int], num_rows: int) -> Tensor:
    """Return the attention mask between the nodes of one tree, (r, N, N), equal in all rows."""
    return ancestors(torch.tensor(parents).repeat(num_rows, 1))
