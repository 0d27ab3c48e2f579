"""Planted faults in structured output: each must make its check fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest
import torch

import decoding.acceptance.relaxed as relaxed
from decoding.acceptance import RandomRelaxation
from decoding.constraints import Constraints
from decoding.grammar import Grammar, Matcher
from decoding.scheduling.slots import SlotTable
from tests.conformance import planted, structures
from tests.conformance.planted import Patch
from tests.conformance.structures import GREEDY, SAMPLED

pytestmark = pytest.mark.slow


def rewrite_masks(patch: Patch, change: Callable[[Any, Sequence[int]], Any]) -> None:
    fill = Matcher.fill

    def altered(self: Any, masks: Any, tokens: Sequence[int], parents: Sequence[int]) -> None:
        fill(self, masks, tokens, parents)
        masks[:] = change(masks.copy(), parents)

    patch.setattr(Matcher, "fill", altered)


def nodes_have_the_mask_of_their_parent(patch: Patch) -> None:
    rewrite_masks(patch, lambda masks, parents: masks[[max(parent, 0) for parent in parents]])


def masks_belong_to_the_row_instead_of_the_slot(patch: Patch) -> None:
    apply = Constraints.apply

    def shifted(self: Any, slots: Any, logits: Any, drafts: Any = None) -> Any:
        kept = self.matchers
        self.matchers = kept[1:] + kept[:1]
        try:
            return apply(self, slots, logits, drafts)
        finally:
            self.matchers = kept

    patch.setattr(Constraints, "apply", shifted)


class Forward:
    """A state of the library whose rollback does nothing."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def rollback(self, num_tokens: int) -> bool:
        return True


def drafts_are_not_rolled_back(patch: Patch) -> None:
    copy = Grammar.copy

    def wrapped(self: Any, failed: Any = None) -> Any:
        state, origin = copy(self, failed)
        return Forward(state), origin

    patch.setattr(Grammar, "copy", wrapped)


def eos_is_allowed_before_the_end(patch: Patch) -> None:
    mask = Matcher._mask

    def early(self: Any) -> Any:
        allowed = mask(self)
        return None if allowed is None else allowed | self._vocabulary.eos_words

    patch.setattr(Matcher, "_mask", early)


def a_refilled_slot_keeps_the_old_state(patch: Patch) -> None:
    occupy = SlotTable.occupy

    def keep(self: Any, ids: Sequence[int], *rest: Any) -> None:
        old = [getattr(self, "last", {}).get(slot) for slot in ids]
        occupy(self, ids, *rest)
        for slot, matcher in zip(ids, old, strict=True):
            if matcher is not None:
                self.constraints.matchers[slot] = matcher
        self.last = getattr(self, "last", {}) | {slot: self.constraints.matchers[slot] for slot in ids}

    patch.setattr(SlotTable, "occupy", keep)


def relaxed_rules_ignore_the_mask(patch: Patch) -> None:
    patch.setattr(
        relaxed, "legal_drafts", lambda verification: torch.ones_like(verification.tree.tokens, dtype=torch.bool)
    )


def equal(method: str, sampling: Any = GREEDY) -> Callable[[], None]:
    return lambda: structures.check_equal(method, 3, sampling)


FAULTS: list[planted.Fault] = [
    (nodes_have_the_mask_of_their_parent, equal("grammar+model")),
    (masks_belong_to_the_row_instead_of_the_slot, equal("plain")),
    (drafts_are_not_rolled_back, equal("tree")),
    (drafts_are_not_rolled_back, equal("grammar")),
    (eos_is_allowed_before_the_end, equal("plain", SAMPLED)),
    (a_refilled_slot_keeps_the_old_state, equal("plain")),
    (
        relaxed_rules_ignore_the_mask,
        lambda: structures.check_legal("model", RandomRelaxation(1.0), GREEDY),
    ),
]


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check, (*planted.CAUGHT, jsonschema.ValidationError))
