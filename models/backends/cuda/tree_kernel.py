"""Triton kernels of tree attention: every row attends to its committed positions and, under a mask, to its scratch.

An online softmax goes over the committed positions of a row, which need no mask, and then over the scratch positions
that follow them. In layers with windows or chunks, it starts at the first position that a query of the block reads.
The queries of one key head are one block, up to MAX_QUERIES, so that K and V are read once. If rows and heads alone do
not fill the GPU, positions are split among programs, and a second kernel merges their results (flash decoding, Dao et
al. 2023).

The positions of a row are P blocks of C positions: pages of a paged cache, or one block with all positions.

Shapes: r rows, H_kv key heads, G query heads per key head, N nodes, M scratch positions, P blocks of C positions, D_h
head size, S splits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_QUERIES = 64
"""Queries of one program; more are divided among programs."""
MAX_SPLITS = 64
SPLITS = ((2, 128), (8, 1024))
"""Programs per streaming multiprocessor up to which positions are split, and the least positions of a split: short
splits pay until all processors are busy, long ones also beyond."""
MIN_BLOCK = 16
"""Shortest side of a matrix for tensor cores."""
MAX_BLOCK_POSITIONS = 128
BLOCK_BYTES = 8 << 10
"""Bytes of the keys of one block; several blocks are loaded ahead."""
LOG2_E = 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _fold(scores, value, top, total, mixed, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a block of positions to the online softmax; scores are base-2 logarithms."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A query that has seen nothing has −inf, and −inf − −inf would be NaN.
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - safe_top[:, None])
    rescale = tl.exp2(top - safe_top)
    total = total * rescale + tl.sum(weights, 1)
    mixed = mixed * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    return new_top, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def _start_of(blocks, row, column, num_blocks, key_head, KEY_HEADS: tl.constexpr, SIZE, HEAD_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the index of the first channel of KV positions `column` of a row, in blocks of SIZE positions."""
    block = tl.load(blocks + row * num_blocks + column // SIZE).to(tl.int64)
    return ((block * KEY_HEADS + key_head) * SIZE + column % SIZE) * HEAD_SIZE


@triton.jit  # type: ignore[untyped-decorator]
def _score(asked, key, scale, cap, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return scores x as base-2 logarithms; with a cap c, in base-2 logarithms as well, c · tanh(x / c)."""
    scores = tl.dot(asked, tl.trans(key), input_precision=PRECISION) * scale
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); 2.885… is 2 / ln 2.
        scores = cap - 2.0 * cap / (tl.exp2(scores / cap * 2.8853900817779268) + 1.0)
    return scores


@triton.jit(do_not_specialize=["num_nodes", "num_scratch", "num_splits", "num_columns", "num_blocks"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, blocks, lens, visible, firsts, sinks, out, totals, scale, cap,
    query_row, query_head, query_node, num_columns, num_blocks, num_nodes, num_scratch, num_splits,
    PAGE: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_FIRST: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with one block of queries of one key head to one split of a row's positions."""
    row = tl.program_id(0) // KEY_HEADS
    key_head = tl.program_id(0) % KEY_HEADS
    split = tl.program_id(2)
    number = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_query = number < GROUP * num_nodes
    node = number % num_nodes
    head = key_head * GROUP + number // num_nodes
    channel = tl.arange(0, BLOCK_D)
    is_channel = channel < HEAD_SIZE
    pointers = query + row * query_row + head[:, None] * query_head + node[:, None] * query_node + channel[None, :]
    asked = tl.load(pointers, mask=is_query[:, None] & is_channel[None, :], other=0.0)

    length = tl.load(lens + row)
    # A row without pages is one block of all positions.
    block_size = PAGE if PAGE > 0 else num_columns
    # The last cache position holds the writes of unused rows.
    end = tl.minimum(length + num_scratch, num_columns - 1)
    if HAS_FIRST:
        lowest = tl.load(firsts + row * num_nodes + node, mask=is_query, other=2147483647)
        # Whole blocks of positions before the first one that any query reads are skipped.
        begin = tl.minimum(tl.maximum(tl.min(lowest, 0), 0), length) // BLOCK_C * BLOCK_C
    else:
        begin = 0
    per_split = tl.cdiv(tl.cdiv(end - begin, num_splits), BLOCK_C) * BLOCK_C
    start = begin + split * per_split
    stop = tl.minimum(start + per_split, end)
    committed = tl.minimum(stop, length)

    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    if HAS_SINKS:
        # One more key, whose value is zero; one of the splits counts it.
        sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(split == 0, sink, top)
        total = tl.where(split == 0, 1.0, total)
    for first in range(start, committed, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)
        is_there = column < committed
        # A block of BLOCK_C positions from a multiple of BLOCK_C on is in one page.
        base = _start_of(blocks, row, first, num_blocks, key_head, KEY_HEADS, block_size, HEAD_SIZE)
        offset = base + (column - first)[:, None] * HEAD_SIZE + channel[None, :]
        is_read = is_there[:, None] & is_channel[None, :]
        key = tl.load(keys + offset, mask=is_read, other=0.0)
        scores = _score(asked, key, scale, cap, HAS_CAP, PRECISION)
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        if HAS_FIRST:
            scores = tl.where(column[None, :] >= lowest[:, None], scores, float("-inf"))
        value = tl.load(values + offset, mask=is_read, other=0.0)
        top, total, mixed = _fold(scores, value, top, total, mixed, PRECISION)
    for first in range(tl.maximum(start, length), stop, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)
        is_there = column < stop
        inside = tl.minimum(column, num_columns - 1)
        base = _start_of(blocks, row, inside, num_blocks, key_head, KEY_HEADS, block_size, HEAD_SIZE)
        offset = base[:, None] + channel[None, :]
        is_read = is_there[:, None] & is_channel[None, :]
        key = tl.load(keys + offset, mask=is_read, other=0.0)
        scores = _score(asked, key, scale, cap, HAS_CAP, PRECISION)
        mask_pointers = visible + (row * num_nodes + node[:, None]) * num_scratch + (column - length)[None, :]
        is_seen = tl.load(mask_pointers, mask=is_query[:, None] & is_there[None, :], other=0) != 0
        scores = tl.where(is_seen, scores, float("-inf"))
        # Positions that no query sees may hold NaN, and 0 · NaN is NaN.
        is_used = tl.max(is_seen.to(tl.int32), 0) > 0
        value = tl.load(values + offset, mask=is_read & is_used[:, None], other=0.0)
        top, total, mixed = _fold(scores, value, top, total, mixed, PRECISION)

    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    is_kept = is_query[:, None] & is_channel[None, :]
    if IS_SPLIT:
        num_rows = tl.num_programs(0) // KEY_HEADS
        index = ((split * num_rows + row) * num_nodes + node) * (KEY_HEADS * GROUP) + head
        tl.store(totals + index, top + tl.log2(tl.where(total > 0.0, total, 1.0)), mask=is_query)
    else:
        index = (row * num_nodes + node) * (KEY_HEADS * GROUP) + head
    tl.store(out + index[:, None] * HEAD_SIZE + channel[None, :], mixed.to(out.dtype.element_ty), mask=is_kept)


@triton.jit(do_not_specialize=["num_splits"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    parts, totals, out, num_splits, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Weigh the results of all splits of one query by their sums."""
    index = tl.program_id(0)
    split = tl.arange(0, BLOCK_S)
    channel = tl.arange(0, BLOCK_D)
    is_split = split < num_splits
    offset = split * tl.num_programs(0) + index
    logs = tl.load(totals + offset, mask=is_split, other=float("-inf"))
    top = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    is_read = is_split[:, None] & (channel < HEAD_SIZE)[None, :]
    part = tl.load(parts + offset[:, None] * HEAD_SIZE + channel[None, :], mask=is_read, other=0.0)
    mixed = tl.sum(part * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + index * HEAD_SIZE + channel, mixed.to(out.dtype.element_ty), mask=channel < HEAD_SIZE)


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def num_splits_of(num_programs: int, num_columns: int, num_processors: int) -> int:
    """Return among how many programs the positions of a row are divided, by numbers that a CUDA graph fixes."""
    wanted = [min(most * num_processors // num_programs, num_columns // least) for most, least in SPLITS]
    return min(MAX_SPLITS, max(1, *wanted))


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    lens: Tensor,
    visible: Tensor,
    scale: float,
    first: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention output (r, N, H, D_h) of `query` (r, H, N, D_h); see `tree_attention.TreeKernel`."""
    num_rows, num_heads, num_nodes, head_size = query.shape
    num_key_heads, block_size = keys.shape[1:3]
    row_blocks = blocks.shape[1]
    num_columns, page = row_blocks * block_size, block_size if row_blocks > 1 else 0
    group = num_heads // num_key_heads
    if query.stride(3) != 1:
        query = query.contiguous()
    blocks = blocks.contiguous()
    block_q = min(MAX_QUERIES, max(MIN_BLOCK, triton.next_power_of_2(group * num_nodes)))
    query_blocks = triton.cdiv(group * num_nodes, block_q)
    num_programs = num_rows * num_key_heads * query_blocks
    num_splits = num_splits_of(num_programs, num_columns, _num_processors(query.device))
    is_split = num_splits > 1
    block_d = max(MIN_BLOCK, triton.next_power_of_2(head_size))
    block_c = max(MIN_BLOCK, min(MAX_BLOCK_POSITIONS, BLOCK_BYTES // (block_d * query.element_size())))
    if page:
        assert page % MIN_BLOCK == 0, "a block of positions lies in one page"
        block_c = min(block_c, page)
    out = query.new_empty(num_rows, num_nodes, num_heads, head_size)
    parts, totals = out, out
    if is_split:
        parts = query.new_empty(num_splits, *out.shape, dtype=torch.float32)
        totals = query.new_empty(num_splits, *out.shape[:3], dtype=torch.float32)
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    launch: Any = _attend[(num_rows * num_key_heads, query_blocks, num_splits)]
    launch(
        query, keys, values, blocks, lens, visible, lens if first is None else first.contiguous(),
        lens if sinks is None else sinks, parts, totals, scale * LOG2_E, softcap * LOG2_E,
        query.stride(0), query.stride(1), query.stride(2), num_columns, row_blocks, num_nodes, visible.shape[2],
        num_splits, page, num_key_heads, group, head_size, block_d, block_q, block_c, is_split,
        first is not None, softcap > 0.0, sinks is not None, precision,
        num_warps=2 if block_q == MIN_BLOCK else 4,
    )  # fmt: skip
    if is_split:
        block_s = triton.next_power_of_2(num_splits)
        _merge[(out.shape[:3].numel(),)](parts, totals, out, num_splits, head_size, block_d, block_s)
    return out
