"""What a step leaves on the device is read by one copy, every value as it was."""

from __future__ import annotations

import pytest
import torch

from decoding.step import StepResult


@pytest.mark.parametrize("has_levels", [False, True])
def test_a_step_is_read_as_it_was(has_levels: bool) -> None:
    torch.manual_seed(0)
    tokens = torch.tensor([[3, 2**40 + 1], [0, -1]])
    logprobs = torch.rand(2, 2).log()
    logprobs[0, 1] = -torch.inf
    n, drafted = torch.tensor([2, 1]), torch.tensor([4, 0])
    relaxed = torch.tensor([[False, True], [False, False]])
    levels = torch.tensor([5, 1]) if has_levels else None
    failed = torch.tensor([True, False])
    step = StepResult(tokens, logprobs, n, drafted, relaxed, levels, failed, 0.0, 0.0, 0.0).send().read()
    assert step.tokens == [[3, 2**40 + 1], [0, -1]]
    assert step.logprobs == logprobs.tolist()
    assert (step.counts, step.num_drafted) == ([2, 1], [4, 0])
    assert step.relaxed == [[False, True], [False, False]]
    assert all(value is True or value is False for row in step.relaxed for value in row)
    assert step.levels == ([5, 1] if has_levels else None)
    assert step.failed == [True, False]
    assert StepResult(tokens, logprobs, n, drafted, relaxed, levels, None, 0.0, 0.0, 0.0).send().read().failed is None
