"""Products of rows in bf16 with weights laid out for them, on a CPU: `gemm.cpp`, compiled when first needed.

oneDNN's kernels for packed weights read them more slowly with few rows, and take a quarter longer with some dozen.
Knows tensors only; `models.backends.cpu.packing` decides when it is used.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from models.backends.cpu.build import Loops, beside
from models.backends.cpu.huge_pages import ask_for_large_pages

BLOCK = 32
"""Outputs whose weights lie together, as the source has it."""
_NUMBER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p
LOOPS = Loops(
    beside("gemm.cpp"),
    {
        "can_multiply": [_ADDRESS],
        "multiply": [_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _NUMBER, _NUMBER, _NUMBER, ctypes.c_int],
    },
    "products on this CPU stay torch's own, which are slower",
)


def can_multiply(weight: Tensor) -> bool:
    """Whether the loops take weights (O, D) of this type, device and size, on this CPU: one with instructions for bf16
    and without tile units, which torch's own kernels use."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.shape[1] % 2:
        return False
    library, answer = LOOPS.library(), ctypes.c_bool(False)
    if library is not None:
        library.can_multiply(ctypes.byref(answer))
    return answer.value


def lay_out(weight: Tensor) -> Tensor:
    """Weights (O, D) in blocks (⌈O / 32⌉, D / 2, 32, 2), with zeros for outputs that the last block has too many."""
    num_outputs, num_inputs = weight.shape
    if rest := -num_outputs % BLOCK:
        weight = F.pad(weight, (0, 0, 0, rest))
    weight = weight.contiguous()
    # Two neighbours are moved as one number, which torch allows where they are a whole number from the memory's begin.
    pairs = (weight.clone() if weight.storage_offset() % 2 else weight).view(torch.int32)
    laid = pairs.view(-1, BLOCK, num_inputs // 2).transpose(1, 2).contiguous()
    ask_for_large_pages(laid.data_ptr(), laid.nbytes)
    return laid.view(torch.bfloat16).view(-1, num_inputs // 2, BLOCK, 2)


def multiply_rows(input: Tensor, laid: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    """`input` (…, D) in bf16 times weights as `lay_out` gives them, plus a `bias` (⌈O / 32⌉ · 32,) in fp32: (…, O).

    Each number is summed in fp32 in the order of the inputs: it does not depend on the other rows, nor on their number.
    """
    input = input.contiguous()
    num_inputs = input.shape[-1]
    assert (input.dtype, num_inputs) == (torch.bfloat16, 2 * laid.shape[1]), (input.dtype, input.shape, laid.shape)
    out = input.new_empty(*input.shape[:-1], num_outputs)
    library = LOOPS.library()
    assert library is not None
    library.multiply(
        input.data_ptr(),
        laid.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        input.numel() // num_inputs,
        num_inputs,
        num_outputs,
        torch.get_num_threads(),
    )
    return out
