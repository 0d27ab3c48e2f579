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
from tests.conformance import planted, relaxation
from tests.conformance.planted import Patch
from tests.conformance.relaxation import LOOSE, SAMPLED, ZERO
from tests.decoding.acceptance import test_lvspec as by_hand

pytestmark = pytest.mark.slow


def special_tokens_may_be_relaxed(patch: Patch) -> None:
    opened = relaxed.RelaxedRule.open

    def forget(self: Any, spec: Any) -> None:
        opened(self, spec)
        self._is_special = torch.zeros_like(self._is_special)

    patch.setattr(relaxed.RelaxedRule, "open", forget)


def relaxed_drafts_are_not_counted(patch: Patch) -> None:
    accept = relaxed.RelaxedRule.accept
    patch.setattr(
        relaxed.RelaxedRule,
        "accept",
        lambda self, verification: replace(v := accept(self, verification), relaxed=torch.zeros_like(v.relaxed)),
    )


def the_targets_choice_ignores_the_shared_noise(patch: Patch) -> None:
    patch.setattr(relaxed, "target_choice", lambda verification: verification.processed_logits.argmax(dim=-1))


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


def honest(name: str, tree: str, temperature: float = 0.0) -> Callable[[], object]:
    return lambda: relaxation.check_honest("llava", tree, LOOSE[name](), 4, temperature)


def tail_blocks() -> None:
    for length, loosened in ((3, 2), (5, 3), (10, 7)):
        by_hand.test_a_tail_block_loosens_the_floor_of_its_own_share(length, loosened)


FAULTS: list[planted.Fault] = [
    (special_tokens_may_be_relaxed, honest("random", "two-branches")),
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
]


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)
