"""Planted faults of recurrent layers: each must make its check fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.backends.states import rules
from models.backends.states.memory import RecurrentStates, StatesStep
from tests.conformance import checks, planted, recurrent, sharing
from tests.conformance.planted import Patch

pytestmark = pytest.mark.slow


def _counts(patch: Patch, wrong: Any) -> None:
    """Change the number of accepted inputs that a step replays."""
    make = RecurrentStates.decoding_step

    def step(self: RecurrentStates, *given: Any) -> StatesStep:
        made = make(self, *given)
        if made.count is not None:
            made.count = wrong(made.count)
        return made

    patch.setattr(RecurrentStates, "decoding_step", step)


def states_are_not_replayed(patch: Patch) -> None:
    _counts(patch, torch.zeros_like)


def one_token_too_many_is_replayed(patch: Patch) -> None:
    _counts(patch, lambda count: count + 1)


def the_last_token_is_not_replayed(patch: Patch) -> None:
    _counts(patch, lambda count: (count - 1).clamp_min(0))


def accepted_inputs_stay_pending(patch: Patch) -> None:
    make = RecurrentStates.decoding_step

    def step(self: RecurrentStates, slots: Any, rows: Tensor, *given: Any) -> StatesStep:
        before = self.pending.clone()
        made = make(self, slots, rows, *given)
        self.pending.copy_(before)
        return made

    patch.setattr(RecurrentStates, "decoding_step", step)


def rejected_inputs_are_replayed(patch: Patch) -> None:
    def accepted(self: StatesStep, num_nodes: int, device: torch.device) -> Tensor:
        return torch.ones(self.rows.shape[0], num_nodes, dtype=torch.bool, device=device)

    patch.setattr(StatesStep, "is_accepted", accepted)


def padding_decays_states(patch: Patch) -> None:
    patch.setattr(StatesStep, "is_real", lambda *_: None)


def convolution_inputs_are_those_of_the_padding(patch: Patch) -> None:
    make = RecurrentStates.prefill_step

    def step(self: RecurrentStates, rows: Tensor, lengths: Any) -> StatesStep:
        return make(self, rows, [max(lengths)] * len(lengths))

    patch.setattr(RecurrentStates, "prefill_step", step)


def convolution_inputs_are_shifted_by_one(patch: Patch) -> None:
    columns = rules._columns
    patch.setattr(rules, "_columns", lambda inputs, index: columns(inputs, (index - 1).clamp_min(0)))


def refilled_slots_keep_their_states(patch: Patch) -> None:
    patch.setattr(RecurrentStates, "clear", lambda *_: None)


def copied_rows_have_no_states(patch: Patch) -> None:
    patch.setattr(RecurrentStates, "copy", lambda *_: None)


def moved_rows_leave_their_states(patch: Patch) -> None:
    tensors = RecurrentStates.tensors

    def some(self: RecurrentStates) -> Any:
        return (tensor for tensor in tensors(self) if tensor.dim() == 1)

    clear, copy = RecurrentStates.clear, RecurrentStates.copy

    def with_all(function: Any) -> Any:
        def run(self: RecurrentStates, *given: Any) -> None:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(RecurrentStates, "tensors", tensors)
                function(self, *given)

        return run

    patch.setattr(RecurrentStates, "clear", with_all(clear))
    patch.setattr(RecurrentStates, "copy", with_all(copy))
    patch.setattr(RecurrentStates, "tensors", some)


def later_drafts_begin_at_the_root(patch: Patch) -> None:
    make = RecurrentStates.decoding_step

    def step(
        self: RecurrentStates, slots: Any, rows: Tensor, is_leading: bool, offset: int, num_nodes: int
    ) -> StatesStep:
        made = make(self, slots, rows, is_leading, offset, num_nodes)
        if offset:
            made.offset, made.num_replayed, made.count = 0, 0, torch.zeros_like(rows)
        return made

    patch.setattr(RecurrentStates, "decoding_step", step)


def all_rows_read_the_states_of_the_first(patch: Patch) -> None:
    read = StatesStep.read
    patch.setattr(StatesStep, "read", lambda self, memory: read(self, memory)[:1].expand_as(read(self, memory)))


def greedy(family: str, drafter: str = "perturbed", slots: int = 4) -> None:
    checks.check_greedy(family, "chain", drafter, slots)


def all_drafts_are_accepted(family: str) -> None:
    checks.check_greedy(family, "chain", "right", 4)


def equal_prompts(family: str) -> None:
    assert sharing.check_equal_prompts("plain", family, 9) == sharing.NUM_PROMPTS


def stems(family: str) -> None:
    sharing.check_questions("plain", family, 9)


FAULTS = [
    (states_are_not_replayed, greedy),
    (one_token_too_many_is_replayed, greedy),
    (the_last_token_is_not_replayed, greedy),
    (accepted_inputs_stay_pending, greedy),
    (rejected_inputs_are_replayed, greedy),
    (padding_decays_states, greedy),
    (padding_decays_states, recurrent.check_ragged_prefill),
    (convolution_inputs_are_those_of_the_padding, greedy),
    (convolution_inputs_are_those_of_the_padding, recurrent.check_ragged_prefill),
    (convolution_inputs_are_shifted_by_one, greedy),
    (refilled_slots_keep_their_states, greedy),
    (refilled_slots_keep_their_states, recurrent.check_emptied_slot),
    (copied_rows_have_no_states, equal_prompts),
    (copied_rows_have_no_states, stems),
    (moved_rows_leave_their_states, greedy),
    (later_drafts_begin_at_the_root, all_drafts_are_accepted),
    (all_rows_read_the_states_of_the_first, greedy),
]
WITHOUT_STATE = (rejected_inputs_are_replayed, padding_decays_states)
"""Faults that short convolutions do not have: they keep inputs, and no state."""
CASES = [
    pytest.param(fault, check, family, id=f"{fault.__name__}-{check.__name__}-{family}")
    for fault, check in FAULTS
    for family in recurrent.KINDS
    if not (family == "lfm2" and fault in WITHOUT_STATE)
]


@pytest.mark.parametrize(("fault", "check", "family"), CASES)
def test_planted_faults_are_found(fault: planted.Plant, check: Any, family: str) -> None:
    planted.assert_caught(fault, lambda: check(family))
