"""Run bf16 GEMMs of few rows with a C++ kernel and blocked weights, `gemm.cpp`, compiled at first use.

oneDNN's packed kernels read weights more slowly with few rows, and take a quarter longer with some dozens of rows.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from models.backends.cpu.build import Library, beside
from models.backends.cpu.huge_pages import advise_huge_pages

BLOCK = 32
"""Outputs per weight block; must equal the constant in `gemm.cpp`."""
_NUMBER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p
LIBRARY = Library(
    beside("gemm.cpp"),
    {
        "can_multiply": [_ADDRESS],
        "multiply": [_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _NUMBER, _NUMBER, _NUMBER, ctypes.c_int],
    },
    "GEMMs on this CPU use torch's kernels, which are slower",
)


def can_multiply(weight: Tensor) -> bool:
    """Return whether the kernel supports weights (O, D): bf16, even D, a CPU with bf16 instructions and without AMX."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.shape[1] % 2:
        return False
    library, answer = LIBRARY.library(), ctypes.c_bool(False)
    if library is not None:
        library.can_multiply(ctypes.byref(answer))
    return answer.value


def pack_blocks(weight: Tensor) -> Tensor:
    """Pack weights (O, D) into blocks (⌈O / 32⌉, D / 2, 32, 2); the last block is padded with zeros."""
    num_outputs, num_inputs = weight.shape
    if rest := -num_outputs % BLOCK:
        weight = F.pad(weight, (0, 0, 0, rest))
    weight = weight.contiguous()
    # Pairs are moved as int32, which requires an even storage offset.
    pairs = (weight.clone() if weight.storage_offset() % 2 else weight).view(torch.int32)
    blocks = pairs.view(-1, BLOCK, num_inputs // 2).transpose(1, 2).contiguous()
    advise_huge_pages(blocks.data_ptr(), blocks.nbytes)
    return blocks.view(torch.bfloat16).view(-1, num_inputs // 2, BLOCK, 2)


def multiply_rows(input: Tensor, blocks: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    """Multiply `input` (…, D) bf16 by weights from `pack_blocks` and add `bias` (⌈O / 32⌉ · 32,) fp32; returns (…, O).

    Sums are in fp32 in the order of the inputs, so a row's result does not depend on the other rows or their number.
    """
    input = input.contiguous()
    num_inputs = input.shape[-1]
    assert (input.dtype, num_inputs) == (torch.bfloat16, 2 * blocks.shape[1]), (input.dtype, input.shape, blocks.shape)
    out = input.new_empty(*input.shape[:-1], num_outputs)
    library = LIBRARY.library()
    assert library is not None
    library.multiply(
        input.data_ptr(),
        blocks.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        input.numel() // num_inputs,
        num_inputs,
        num_outputs,
        torch.get_num_threads(),
    )
    return out
