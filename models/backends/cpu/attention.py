"""Attention over ragged rows on a CPU, and what goes before it: `attention.cpp`, compiled when first needed.

torch's own kernel packs keys and values for matrix products and computes every column of a window, which takes many
times as long as reading once what a row really holds. Knows tensors only; `models.backends.attention` decides when it
is used.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from models.backends.cpu.build import Loops, beside

STRIP = 32
"""Head sizes have to be multiples of this."""
_FUNCTIONS = {torch.float32: ("step_fp32", "place_fp32"), torch.bfloat16: ("step_bf16", "place_bf16")}
_Sizes, _Strides = ctypes.c_int64 * 6, ctypes.c_int64 * 17
_PlaceSizes = ctypes.c_int64 * 5
_OF_STEP: list[Any] = [*[ctypes.c_void_p] * 11, ctypes.c_float, ctypes.c_int]
_OF_PLACE: list[Any] = [ctypes.c_void_p] * 9
LOOPS = Loops(
    beside("vectors.h", "attention.cpp"),
    {name: takes for both in _FUNCTIONS.values() for name, takes in zip(both, (_OF_STEP, _OF_PLACE), strict=True)},
    "attention on this CPU stays torch's own, which is slower",
    ("-ffp-contract=fast",),
)


def can_loop(memory: Tensor) -> bool:
    """Whether the loops take a memory (rows, H_kv, capacity, D) of this type, device and head size, and are built."""
    fits = memory.device.type == "cpu" and memory.dtype in _FUNCTIONS and memory.shape[3] % STRIP == 0
    return fits and LOOPS.library() is not None


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    columns: Tensor,
    mask: Tensor | None,
    scaling: float,
) -> Tensor:
    """Write a forward's N nodes into the memory, and let them attend.

    `query` (r, H, N, D), `key` and `value` (r, H_kv, N, D) of the nodes, which go to `rows` (r,) and `columns` (r, N)
    of the memory `keys` and `values` (rows, H_kv, capacity, D). With a `mask` (r, 1, N, W), which is added to the
    scores, the memory's first r rows are read, up to the last column that is open to any node; without one each node
    sees the new ones up to itself. Query heads share key-value heads group by group. Sums are in fp32. Returns
    (r, N, H, D).
    """
    num_rows, num_heads, num_nodes, head_dim = query.shape
    num_kv_heads = key.shape[1]
    out = query.new_empty(num_rows, num_nodes, num_heads, head_dim)
    columns = columns.contiguous()
    one, two, three, four, five = query.stride(), key.stride(), value.stride(), keys.stride(), values.stride()
    assert one[3] == two[3] == three[3] == four[3] == five[3] == 1, "the last axis has to be dense"
    window = num_nodes if mask is None else mask.shape[3]
    of_mask: tuple[int, ...] = (0, 0, 0) if mask is None else mask.stride()
    getattr(LOOPS.library(), _FUNCTIONS[query.dtype][0])(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        rows.data_ptr(),
        columns.data_ptr(),
        None if mask is None else mask.data_ptr(),
        out.data_ptr(),
        _Sizes(num_rows, num_kv_heads, num_heads // num_kv_heads, num_nodes, head_dim, window),
        _Strides(*one[:3], *two[:3], *three[:3], *four[:3], *five[:3], of_mask[0], of_mask[2]),
        scaling,
        torch.get_num_threads(),
    )
    return out


def can_place(lens: Tensor, dtype: torch.dtype) -> bool:
    """Whether `place_nodes` serves these rows for states of this type: only where the loops are at work already."""
    return lens.device.type == "cpu" and dtype in _FUNCTIONS and LOOPS.is_at_work


def place_nodes(
    lens: Tensor, delta: Tensor, depth: Tensor, visible: Tensor, offset: int, window: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns (r, N) and positions (r, N) of N nodes a row, and what is added to their scores (r, 1, N, window).

    The rows hold `lens` (r,) columns and stand `delta` (r,) positions further; nodes of `depth` (r, N) go to scratch
    columns from `offset` on and see those that `visible` (r, N, M) marks. In one pass what
    `models.backends.attention.tree_mask` and its neighbours take twenty small operations for.
    """
    num_rows, num_nodes, num_scratch = visible.shape
    columns, positions = lens.new_empty(num_rows, num_nodes), lens.new_empty(num_rows, num_nodes)
    mask = torch.empty(num_rows, 1, num_nodes, window, dtype=dtype)
    assert lens.is_contiguous(), "lengths of rows have to be dense"
    assert delta.is_contiguous(), "offsets of rows have to be dense"
    assert (depth.dtype, visible.dtype) == (torch.long, torch.bool), (depth.dtype, visible.dtype)
    getattr(LOOPS.library(), _FUNCTIONS[dtype][1])(
        lens.data_ptr(),
        delta.data_ptr(),
        depth.data_ptr(),
        visible.data_ptr(),
        _PlaceSizes(num_rows, num_nodes, num_scratch, offset, window),
        _PlaceSizes(*depth.stride(), *visible.stride()),
        columns.data_ptr(),
        positions.data_ptr(),
        mask.data_ptr(),
    )
    return columns, positions, mask


def _places(
    lens: Tensor, delta: Tensor, depth: Tensor, visible: Tensor, offset: int, window: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_nodes = depth.shape
    mask = lens.new_empty(num_rows, 1, num_nodes, window, dtype=dtype)
    return lens.new_empty(num_rows, num_nodes), lens.new_empty(num_rows, num_nodes), mask


def _shape(query: Tensor, *_: object) -> Tensor:
    num_rows, num_heads, num_nodes, head_dim = query.shape
    return query.new_empty(num_rows, num_nodes, num_heads, head_dim)


_definition = torch.library.Library("draftfleet", "FRAGMENT")  # type: ignore[no-untyped-call]
_definition.define(  # type: ignore[no-untyped-call]
    "attend_rows(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor rows, "
    "Tensor columns, Tensor? mask, float scaling) -> Tensor"
)
_definition.impl("attend_rows", attend_rows, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("draftfleet::attend_rows", _shape, lib=_definition)
_definition.define(  # type: ignore[no-untyped-call]
    "place_nodes(Tensor lens, Tensor delta, Tensor depth, Tensor visible, int offset, int window, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)"
)
_definition.impl("place_nodes", place_nodes, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("draftfleet::place_nodes", _places, lib=_definition)
OPERATION = torch.ops.draftfleet.attend_rows
PLACE = torch.ops.draftfleet.place_nodes
