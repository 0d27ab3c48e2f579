"""Attention over ragged rows on a CPU: `attention_loops.cpp`, compiled when it is first needed.

torch's own kernel packs keys and values for matrix products and computes every column of a window, which takes many
times as long as reading once what a row really holds. Knows tensors only; `models.attention` decides when it is used.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")
STRIP = 32
"""Head sizes have to be multiples of this."""
_FUNCTIONS = {torch.float32: "step_fp32", torch.bfloat16: "step_bf16"}
_Sizes, _Strides = ctypes.c_int64 * 6, ctypes.c_int64 * 17


def can_loop(memory: Tensor) -> bool:
    """Whether the loops take a memory (rows, H_kv, capacity, D) of this type, device and head size, and are built."""
    fits = memory.device.type == "cpu" and memory.dtype in _FUNCTIONS and memory.shape[3] % STRIP == 0
    return fits and _is_built()


@functools.cache
def _is_built() -> bool:
    try:
        _library()
    except Exception as error:  # compilers and what starts them fail in ways of their own
        reason = " ".join(str(error).splitlines()[:2]) or type(error).__name__
        logger.warning("attention on this CPU stays torch's own, which is slower: %s", reason)
        return False
    return True


@functools.cache
def _library() -> ctypes.CDLL:
    # Most processes never compile, and importing this takes a second. Torch keeps what it compiled between processes.
    from torch._inductor.codecache import CppCodeCache

    library: ctypes.CDLL = CppCodeCache.load(SOURCE.read_text(), extra_flags=("-ffp-contract=fast",))
    for name in _FUNCTIONS.values():
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p] * 11 + [ctypes.c_float, ctypes.c_int]
        function.restype = None
    return library


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
    getattr(_library(), _FUNCTIONS[query.dtype])(
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
OPERATION = torch.ops.draftfleet.attend_rows
