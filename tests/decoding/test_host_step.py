"""A step's results reach the host unchanged: read at once on a CPU, from one packed copy elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from decoding.step import HostStep, StepOutput, StepResult
from models.backends.base import REFERENCE
from models.backends.cpu.backend import CpuBackend
from models.backends.host_copy import PackedCopy


def by_packed_copy(step: StepResult) -> HostStep:
    copy = REFERENCE.copy_to_host(step.output)
    assert isinstance(copy, PackedCopy)
    return HostStep._make(copy.read())


def at_once(step: StepResult) -> HostStep:
    copy = CpuBackend().copy_to_host(step.output)
    # Later steps overwrite the tensors.
    counts = step.output.counts
    assert counts is not None
    counts.add_(7)
    host_step = HostStep._make(copy.read())
    counts.sub_(7)
    return host_step


@pytest.mark.parametrize("read", [at_once, by_packed_copy])
@pytest.mark.parametrize("has_levels", [False, True])
def test_the_host_copy_of_a_step_equals_its_tensors(has_levels: bool, read: Callable[[StepResult], HostStep]) -> None:
    torch.manual_seed(0)
    tokens = torch.tensor([[3, 2**40 + 1], [0, -1]])
    logprobs = torch.rand(2, 2).log()
    logprobs[0, 1] = -torch.inf
    n, drafted = torch.tensor([2, 1]), torch.tensor([4, 0])
    relaxed = torch.tensor([[False, True], [False, False]])
    levels = torch.tensor([5, 1]) if has_levels else None
    failed = torch.tensor([True, False])
    step = read(StepResult(StepOutput(tokens, logprobs, n, drafted, relaxed, levels, failed), 0.0, 0.0, 0.0))
    assert step.tokens == [[3, 2**40 + 1], [0, -1]]
    assert step.logprobs == logprobs.tolist()
    assert (step.counts, step.num_drafted) == ([2, 1], [4, 0])
    assert step.relaxed == [[False, True], [False, False]]
    assert all(value is True or value is False for row in step.relaxed for value in row)
    assert step.levels == ([5, 1] if has_levels else None)
    assert step.failed == [True, False]
    assert (
        read(StepResult(StepOutput(tokens, logprobs, n, drafted, relaxed, levels, None), 0.0, 0.0, 0.0)).failed is None
    )
