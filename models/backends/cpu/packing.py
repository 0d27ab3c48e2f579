"""Run GEMMs with weights packed once, by `models.backends.cpu.gemm` or oneDNN.

`merge_linears` rewrites a traced graph: linear layers of the same input (query, key and value; gate and up) become one
GEMM. Packed copies are stored by address of the weight, so that all graphs share one copy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.backends.cpu.gemm import BLOCK, can_multiply, multiply_rows, pack_blocks
from models.backends.cpu.huge_pages import advise_huge_pages

PACKABLE = (torch.bfloat16, torch.float32)
"""Weight dtypes with packed oneDNN kernels; layers of other dtypes are not packed."""


@dataclass(frozen=True)
class _Packed:
    """Concatenated weights and biases of merged layers in the layout of the kernel.

    `originals` keeps the weights alive, because packed copies are found by address.
    """

    weight: Tensor
    bias: Tensor | None
    originals: tuple[Tensor, ...]
    num_outputs: int
    is_own_gemm: bool


_packed: dict[int, _Packed] = {}


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether packed kernels exist for weights of a dtype on a device."""
    if device.type != "cpu" or dtype not in PACKABLE or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def merge_linears(graph: torch.fx.Graph) -> int:
    """Replace the linear layers of a graph by packed GEMMs, one per input tensor; returns the number of GEMMs."""
    readers: dict[Any, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is F.linear:
            readers.setdefault(node.args[0], []).append(node)
    for source, nodes in readers.items():
        weights = [_argument(node, 1, "weight") for node in nodes]
        biases = [_argument(node, 2, "bias") for node in nodes]
        with graph.inserting_before(nodes[0]):
            fused = graph.call_function(OPERATION.default, (source, weights, biases))
            parts = [fused]
            if len(nodes) > 1:
                sizes = [int(weight.meta["example_value"].shape[0]) for weight in weights]
                split = graph.call_function(torch.split, (fused, sizes, -1))
                parts = [graph.call_function(operator.getitem, (split, index)) for index in range(len(nodes))]
        for node, part in zip(nodes, parts, strict=True):
            node.replace_all_uses_with(part)
            graph.erase_node(node)
    graph.lint()
    return len(readers)


def _argument(node: torch.fx.Node, index: int, name: str) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def multiply(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """Apply linear layers `weights` (O, D), `biases` (O,) to `input` (…, D); concatenate the outputs (…, sum of O)."""
    # Merged weights are stored under the address of the first one.
    packed = _packed.get(weights[0].data_ptr())
    if packed is None:
        packed = _pack(weights, biases)
    if packed.is_own_gemm:
        return multiply_rows(input, packed.weight, packed.bias, packed.num_outputs)
    out: Tensor = _KERNEL(input, packed.weight, packed.bias, "none", [], "")
    return out


def _pack(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> _Packed:
    with torch.no_grad():
        bias = None
        if any(b is not None for b in biases):
            pairs = zip(biases, weights, strict=True)
            bias = torch.cat([w.new_zeros(w.shape[0]) if b is None else b for b, w in pairs])
        # A single weight needs no concatenated copy.
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        num_outputs, is_own_gemm = weight.shape[0], can_multiply(weight)
        if is_own_gemm:
            weight = pack_blocks(weight)
            bias = None if bias is None else F.pad(bias.float(), (0, -num_outputs % BLOCK))
        else:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            advise_huge_pages(torch.ops.mkldnn.data_ptr(weight), torch.ops.mkldnn._nbytes(weight))
    packed = _Packed(weight, bias, tuple(weights), num_outputs, is_own_gemm)
    _packed[weights[0].data_ptr()] = packed
    return packed


def forget(weights: Iterable[int]) -> None:
    """Release the packed copies of weights. `weights` are addresses (`Tensor.data_ptr()`); unknown ones are ignored."""
    for address in weights:
        _packed.pop(address, None)


def _shape(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    return input.new_empty(*input.shape[:-1], sum(weight.shape[0] for weight in weights))


_KERNEL = torch.ops.mkldnn._linear_pointwise.default
_library = torch.library.Library("draftfleet", "DEF")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor input, Tensor[] weights, Tensor?[] biases) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("packed_linear", multiply, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("draftfleet::packed_linear", _shape, lib=_library)
OPERATION = torch.ops.draftfleet.packed_linear
