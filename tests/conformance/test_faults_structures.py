"""Planted faults in structured output: each must make its check fail."""

from __future__ import annotations

import json
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
from tests.conformance import structures
from tests.conformance.structures import GREEDY, SAMPLED

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def rewrite_masks(patch: Patch, change: Callable[[Any, Sequence[int]], Any]) -> None:
    fill = Matcher.fill

    def altered(self: Any, masks: Any, tokens: Sequence[int], parents: Sequence[int]) -> None:
        fill(self, masks, tokens, parents)
        masks[:] = change(masks.copy(), parents)

    patch.setattr(Matcher, "fill", altered)


def nodes_have_the_mask_of_their_parent(patch: Patch) -> None:
    rewrite_masks(patch, lambda masks, parents: masks[[max(parent, 0) for parent in parents]])


def nodes_have_the_mask_of_the_root(patch: Patch) -> None:
    rewrite_masks(patch, lambda masks, _: masks[[0] * len(masks)])


def nodes_have_the_mask_of_their_neighbour(patch: Patch) -> None:
    rewrite_masks(patch, lambda masks, _: masks[[0, *range(len(masks) - 1)]])


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
        found = mask(self)
        return None if found is None else found | self._vocabulary.eos_words

    patch.setattr(Matcher, "_mask", early)


def eos_is_not_allowed_at_the_end(patch: Patch) -> None:
    mask = Matcher._mask

    def never(self: Any) -> Any:
        found = mask(self)
        return None if found is None else found & ~self._vocabulary.eos_words

    patch.setattr(Matcher, "_mask", never)


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


def rows_share_one_state(patch: Patch) -> None:
    states: dict[int, Matcher] = {}
    patch.setattr(Grammar, "start", lambda self: states.setdefault(id(self), Matcher(self)))


def the_first_token_is_not_masked(patch: Patch) -> None:
    apply = Constraints.apply
    patch.setattr(
        Constraints,
        "apply",
        lambda self, slots, logits, drafts=None: logits if drafts is None else apply(self, slots, logits, drafts),
    )


def generated_tokens_are_not_followed(patch: Patch) -> None:
    patch.setattr(Matcher, "advance", lambda self, token: None)


def relaxed_rules_ignore_the_mask(patch: Patch) -> None:
    patch.setattr(relaxed, "legal_drafts", lambda one: torch.ones_like(one.tree.tokens, dtype=torch.bool))


def equal(method: str, sampling: Any = GREEDY) -> Callable[[], None]:
    return lambda: structures.check_equal(method, 3, sampling)


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (nodes_have_the_mask_of_their_parent, equal("grammar+model")),
    (nodes_have_the_mask_of_the_root, equal("grammar")),
    (nodes_have_the_mask_of_their_neighbour, equal("tree", SAMPLED)),
    (masks_belong_to_the_row_instead_of_the_slot, equal("plain")),
    (drafts_are_not_rolled_back, equal("tree")),
    (drafts_are_not_rolled_back, equal("grammar")),
    (eos_is_allowed_before_the_end, equal("plain", SAMPLED)),
    (eos_is_not_allowed_at_the_end, equal("model")),
    (a_refilled_slot_keeps_the_old_state, equal("plain")),
    (rows_share_one_state, equal("model")),
    (the_first_token_is_not_masked, equal("plain")),
    (generated_tokens_are_not_followed, equal("plain")),
    (
        relaxed_rules_ignore_the_mask,
        lambda: structures.check_legal("model", RandomRelaxation(1.0), GREEDY),
    ),
]


@pytest.mark.parametrize(
    ("fault", "check"), FAULTS, ids=[f"{place}-{fault.__name__}" for place, (fault, _) in enumerate(FAULTS)]
)
def test_a_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    structures.expected(GREEDY), structures.expected(SAMPLED)
    fault(monkeypatch)
    with pytest.raises((AssertionError, jsonschema.ValidationError, json.JSONDecodeError)):
        check()
