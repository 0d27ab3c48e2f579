"""Linear layers of a step are one matrix product each.

torch computes a linear layer over a view with gaps as a product of batches, and copies its weights for every row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decoding import Engine
from tests import toys
from tests.conformance import checks
from tests.conformance.methods import FAST, METHODS
from tests.covering import tiers

LLAMA = [name for name, (_, families) in METHODS.items() if "llama" in families]


def folds(states: Tensor) -> bool:
    """Whether torch views the input (…, D) of a linear layer as one matrix."""
    shape, stride = states.shape, states.stride()
    return all(stride[axis] == stride[axis + 1] * shape[axis + 1] for axis in range(states.dim() - 2))


class Inputs(TorchDispatchMode):
    """Notes the inputs of linear layers that do not fold."""

    def __init__(self) -> None:
        super().__init__()
        self.num_linear = 0
        self.with_gaps: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.linear.default:
            self.num_linear += 1
            if not folds(args[0]):
                self.with_gaps.append((tuple(args[0].shape), args[0].stride()))
        return func(*args, **(kwargs or {}))


@tiers("name, slots", LLAMA, [1, 3], strength=1, fast=FAST)
def test_linear_layers_read_no_view_with_gaps(name: str, slots: int) -> None:
    engine = Engine(toys.target("llama"), METHODS[name][0]("llama"), slots, 160)
    with Inputs() as inputs:
        checks.run(engine, checks.requests("llama", 5))
    assert inputs.num_linear > 0
    assert inputs.with_gaps == []
