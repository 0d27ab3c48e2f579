"""Run attention over rows of different lengths on a CPU with a C++ kernel, `attention.cpp`, compiled at first use.

torch's kernel packs keys and values for GEMMs and computes every position of a window. This kernel reads only the
positions of a row, once. Long prompts use torch's, whose GEMMs are faster then.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.backends.attention import AttentionStep
from models.backends.cpu.build import Library, beside

STRIP = 32
"""Head sizes must be multiples of this."""
LONG_PROMPT = {torch.float32: 1024, torch.bfloat16: 256}
"""Minimum tokens of a prefill that uses torch's kernel, by dtype: where it was faster on a CPU with AMX. Prompts of
this length run alone on a CPU, so sums do not depend on other rows."""
_FUNCTIONS = {torch.float32: "step_fp32", torch.bfloat16: "step_bf16"}
_Sizes, _Strides = ctypes.c_int64 * 6, ctypes.c_int64 * 17
_STEP_TYPES: list[Any] = [*[ctypes.c_void_p] * 11, ctypes.c_float, ctypes.c_int]
LIBRARY = Library(
    beside("vectors.h", "attention.cpp"),
    dict.fromkeys(_FUNCTIONS.values(), _STEP_TYPES),
    "attention on this CPU uses torch's kernel, which is slower",
    ("-ffp-contract=fast",),
)


def can_attend(memory: Tensor) -> bool:
    """Return whether the kernel builds and supports the dtype, device and head size D of a cache (rows, H_kv, …, D)."""
    fits = memory.device.type == "cpu" and memory.dtype in _FUNCTIONS and memory.shape[3] % STRIP == 0
    return fits and LIBRARY.library() is not None


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
    """Write K and V of the N new nodes of a forward to the KV cache, and compute their attention.

    `query` (r, H, N, D), `key` and `value` (r, H_kv, N, D) are written to `rows` (r,) and `columns` (r, N) of the cache
    `keys` and `values` (rows, H_kv, capacity, D). With a `mask` (r, 1, N, W), which is added to the scores, the first r
    rows of the cache are read up to the last unmasked position; without one, attention is causal over the new nodes.
    Query heads share key-value heads in groups. Sums are in fp32. Returns (r, N, H, D).
    """
    if mask is None and query.shape[2] >= _least_long(query.dtype):
        keys[rows[:, None], :, columns] = key.transpose(1, 2)
        values[rows[:, None], :, columns] = value.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return mixed.transpose(1, 2).contiguous()
    num_rows, num_heads, num_nodes, head_dim = query.shape
    num_kv_heads = key.shape[1]
    out = query.new_empty(num_rows, num_nodes, num_heads, head_dim)
    columns = columns.contiguous()
    strides = [tensor.stride() for tensor in (query, key, value, keys, values)]
    assert all(stride[3] == 1 for stride in strides), "the last axis must be contiguous"
    window = num_nodes if mask is None else mask.shape[3]
    of_mask: tuple[int, ...] = (0, 0, 0) if mask is None else mask.stride()
    getattr(LIBRARY.library(), _FUNCTIONS[query.dtype])(
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
        _Strides(*(size for stride in strides for size in stride[:3]), of_mask[0], of_mask[2]),
        scaling,
        torch.get_num_threads(),
    )
    return out


@cache
def _least_long(dtype: torch.dtype) -> float:
    """Return the least number of tokens for torch's kernel; it needs bf16 GEMMs for that dtype."""
    has_gemms = dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return LONG_PROMPT[dtype] if has_gemms else float("inf")


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


class RowsKernel:
    """Attention kernel of compiled layers; see `models.backends.attention.AttentionKernel`."""

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
        """See `attend_rows`; decoders with caps or sinks are not compiled, see `can_compile`."""
        assert softcap is None, "the kernel caps no scores"
        assert sinks is None, "the kernel has no attention sinks"
        keys, values = step.cache.layer(layer)
        out: Tensor = OPERATION(query, key, value, keys, values, step.rows, step.columns, step.mask, scale)
        return out

    def on(self, device: torch.device) -> RowsKernel:
        """Return this kernel, because compiled layers are on one device."""
        return self


ROWS_KERNEL = RowsKernel()
