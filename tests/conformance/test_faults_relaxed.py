"""Planted faults in the relaxed rules: each must make its check fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import decoding.acceptance.relaxed as relaxed
from decoding.acceptance import LVSpec
from decoding.acceptance.lvspec import VisualMemory
from decoding.tree import Verdict
from tests.conformance import relaxation
from tests.conformance.relaxation import LOOSE, SAMPLED, ZERO
from tests.decoding.acceptance import test_lvspec as by_hand

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def special_tokens_may_be_relaxed(patch: Patch) -> None:
    opened = relaxed.RelaxedRule.open

    def forget(self: Any, spec: Any) -> None:
        opened(self, spec)
        self._is_special = torch.zeros_like(self._is_special)

    patch.setattr(relaxed.RelaxedRule, "open", forget)


def the_targets_token_is_emitted_in_the_drafts_place(patch: Patch) -> None:
    judge = relaxed.RelaxedRule.judge

    def substitute(self: Any, judgement: Any) -> Verdict:
        verdict = judge(self, judgement)
        wanted = relaxed.target_choice(judgement).gather(1, judgement.tree.parents.clamp_min(0))
        judgement.tree.tokens[:, 1:] = wanted[:, 1:]
        return verdict

    patch.setattr(relaxed.RelaxedRule, "judge", substitute)


def relaxed_drafts_are_not_counted(patch: Patch) -> None:
    judge = relaxed.RelaxedRule.judge
    patch.setattr(
        relaxed.RelaxedRule,
        "judge",
        lambda self, one: replace(v := judge(self, one), relaxed=torch.zeros_like(v.relaxed)),
    )


def the_targets_choice_ignores_the_shared_noise(patch: Patch) -> None:
    patch.setattr(relaxed, "target_choice", lambda one: one.warped.argmax(dim=-1))


def visual_states_belong_to_the_row_instead_of_the_slot(patch: Patch) -> None:
    measure = VisualMemory.relevance

    def by_row(self: Any, slots: Any, hidden: Tensor, top: int) -> Tensor:
        moved = replace(slots, index=torch.zeros_like(slots.index), ids=(0,) * len(slots.ids))
        return measure(self, moved, hidden, top)

    patch.setattr(VisualMemory, "relevance", by_row)


def the_share_is_taken_of_the_longest_block(patch: Patch) -> None:
    opened = LVSpec.open

    def forget(self: Any, spec: Any) -> None:
        opened(self, spec)
        self._quota[:] = self._quota.max()

    patch.setattr(LVSpec, "open", forget)


def relevance_is_read_at_the_parent(patch: Patch) -> None:
    measure = VisualMemory.relevance
    patch.setattr(
        VisualMemory, "relevance", lambda self, slots, hidden, top: measure(self, slots, hidden.roll(1, 1), top)
    )


def honest(name: str, tree: str, temperature: float = 0.0) -> Callable[[], object]:
    return lambda: relaxation.check_honest("llava", tree, LOOSE[name](), 4, temperature)


def tail_blocks() -> None:
    for length, loosened in ((3, 2), (5, 3), (10, 7)):
        by_hand.test_a_tail_block_loosens_the_floor_of_its_own_share(length, loosened)


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], object]]] = [
    (special_tokens_may_be_relaxed, honest("random", "two-branches")),
    (the_targets_token_is_emitted_in_the_drafts_place, honest("lvspec-shift", "chain")),
    (relaxed_drafts_are_not_counted, honest("fly-gate", "chain")),
    (
        the_targets_choice_ignores_the_shared_noise,
        lambda: relaxation.check_zero("llava", "chain", ZERO["random"](), 4, SAMPLED),
    ),
    (
        visual_states_belong_to_the_row_instead_of_the_slot,
        lambda: relaxation.check_independence("llava", "chain", LOOSE["lvspec"], SAMPLED),
    ),
    (the_share_is_taken_of_the_longest_block, tail_blocks),
    (relevance_is_read_at_the_parent, by_hand.test_the_seven_least_relevant_of_ten_are_loosened),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    try:
        check()
    except (AssertionError, IndexError):
        return
    pytest.fail(f"the check passes although {fault.__name__.replace('_', ' ')}")


@pytest.mark.parametrize("place", range(len(FAULTS)), ids=[fault.__name__ for fault, _ in FAULTS])
def test_the_same_check_passes_without_the_fault(place: int) -> None:
    FAULTS[place][1]()
