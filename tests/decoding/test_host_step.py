"""What a step leaves is read with every value as it was: at once on a CPU, and from one copy elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from decoding.step import HostStep, SentStep, StepResult, packed


class Arrival:
    """A copy that has arrived once it was waited for."""

    is_there = False

    def synchronize(self) -> None:
        self.is_there = True


def by_one_copy(step: StepResult) -> HostStep:
    outcome = (step.tokens, step.logprobs, step.n, step.num_drafted, step.relaxed, step.levels, step.failed)
    arrival = Arrival()
    found = SentStep(outcome, packed(outcome), arrival).read()  # type: ignore[arg-type]
    assert arrival.is_there
    return found


def at_once(step: StepResult) -> HostStep:
    sent = step.send()
    # What is written later belongs to later steps.
    step.n.add_(7)
    found = sent.read()
    step.n.sub_(7)
    return found


@pytest.mark.parametrize("read", [at_once, by_one_copy])
@pytest.mark.parametrize("has_levels", [False, True])
def test_a_step_is_read_as_it_was(has_levels: bool, read: Callable[[StepResult], HostStep]) -> None:
    torch.manual_seed(0)
    tokens = torch.tensor([[3, 2**40 + 1], [0, -1]])
    logprobs = torch.rand(2, 2).log()
    logprobs[0, 1] = -torch.inf
    n, drafted = torch.tensor([2, 1]), torch.tensor([4, 0])
    relaxed = torch.tensor([[False, True], [False, False]])
    levels = torch.tensor([5, 1]) if has_levels else None
    failed = torch.tensor([True, False])
    step = read(StepResult(tokens, logprobs, n, drafted, relaxed, levels, failed, 0.0, 0.0, 0.0))
    assert step.tokens == [[3, 2**40 + 1], [0, -1]]
    assert step.logprobs == logprobs.tolist()
    assert (step.counts, step.num_drafted) == ([2, 1], [4, 0])
    assert step.relaxed == [[False, True], [False, False]]
    assert all(value is True or value is False for row in step.relaxed for value in row)
    assert step.levels == ([5, 1] if has_levels else None)
    assert step.failed == [True, False]
    assert read(StepResult(tokens, logprobs, n, drafted, relaxed, levels, None, 0.0, 0.0, 0.0)).failed is None
