"""Planted faults of adaptive trees and prompt lookup: each must make its check fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import decoding.trees.confidence as confidence_module
import decoding.trees.index_tree as index_tree
import decoding.trees.pool as pool
import decoding.trees.sage as sage
from decoding import Sampling
from decoding.drafters import LookupDrafter
from decoding.tree import DraftTree
from decoding.trees import SageTree
from tests.conformance import checks, test_adaptive
from tests.decoding import test_adaptive_steps
from tests.decoding.trees import test_sage

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def padding_is_offered_as_drafts(patch: Patch) -> None:
    finish = SageTree.finish

    def all_valid(self: SageTree) -> DraftTree:
        tree = finish(self)
        return replace(tree, valid=torch.ones_like(tree.valid), parents=tree.parents.clamp_min(0))

    patch.setattr(SageTree, "finish", all_valid)


def a_node_takes_its_token_from_another_parent(patch: Patch) -> None:
    unpack = sage._unpack

    def swapped(packed: Any) -> Any:
        tree = unpack(packed)
        return replace(tree, place=torch.where(tree.expanded, tree.place.flip(1), 0))

    patch.setattr(sage, "_unpack", swapped)


def the_plan_of_one_row_serves_all(patch: Patch) -> None:
    plan = sage.plan_tree

    def first_only(probs: Any, alpha: Any, max_depth: Any, settings: Any) -> Any:
        rows = torch.zeros_like(max_depth)
        return plan(probs[rows], alpha[rows], max_depth[rows], settings)

    patch.setattr(sage, "plan_tree", first_only)


def a_refilled_slot_keeps_the_former_samples_tree(patch: Patch) -> None:
    patch.setattr(SageTree, "reset", lambda self, slots: None)


def the_parent_of_a_kept_node_is_dropped(patch: Patch) -> None:
    def any_order(values: Any, count: int) -> Any:
        ordered, index = values.flip(1).sort(dim=1, descending=True, stable=True)
        return ordered[:, :count], values.shape[1] - 1 - index[:, :count]

    for module in (index_tree, pool):
        patch.setattr(module, "best_of", any_order)


def the_confidence_is_the_entropy(patch: Patch) -> None:
    original = confidence_module.confidence
    patch.setattr(sage, "confidence", lambda probs: 1.0 - original(probs))


def the_bonus_token_counts_as_accepted(patch: Patch) -> None:
    learn = sage.Confidence.learn
    patch.setattr(
        sage.Confidence,
        "learn",
        lambda self, slots, alpha, verdict: learn(self, slots, alpha, replace(verdict, n=verdict.n + 1)),
    )


def look_up_forgets_what_was_accepted(patch: Patch) -> None:
    patch.setattr(LookupDrafter, "commit", lambda self, judgement, verdict: None)


def look_up_copies_from_one_place_too_far(patch: Patch) -> None:
    import decoding.drafters.lookup as lookup

    find = lookup.find_match

    def further(*args: Any) -> Any:
        start, found = find(*args)
        return start + 1, found

    patch.setattr(lookup, "find_match", further)


def sampled_independence(tree: str, family: str = "llava", count: int = 8) -> Callable[[], object]:
    return lambda: checks.check_independence(family, tree, Sampling(), count)


def repeats() -> None:
    test_adaptive.test_lookup_accepts_most_of_a_text_that_repeats("latest", SageTree)


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], object]]] = [
    (padding_is_offered_as_drafts, test_adaptive_steps.test_padding_is_masked_and_attends_only_to_itself),
    (
        a_node_takes_its_token_from_another_parent,
        test_adaptive.test_the_target_as_its_own_drafter_is_taken_to_the_trees_end,
    ),
    (the_plan_of_one_row_serves_all, test_adaptive_steps.test_rows_of_one_batch_get_trees_of_their_own_shape),
    (the_plan_of_one_row_serves_all, sampled_independence("sage_deep")),
    (a_refilled_slot_keeps_the_former_samples_tree, sampled_independence("sage_deep", "llama", 20)),
    (the_parent_of_a_kept_node_is_dropped, test_sage.test_the_worked_example_of_the_plan),
    (the_confidence_is_the_entropy, test_adaptive_steps.test_rows_of_one_batch_get_trees_of_their_own_shape),
    (
        the_bonus_token_counts_as_accepted,
        test_adaptive_steps.test_history_lowers_and_raises_the_deepest_tree_once_its_window_is_full,
    ),
    (look_up_forgets_what_was_accepted, repeats),
    (look_up_copies_from_one_place_too_far, repeats),
]


@pytest.fixture(autouse=True)
def known_to_the_checks(monkeypatch: Patch) -> None:
    for name, tree in test_adaptive.TREES.items():
        monkeypatch.setitem(checks.TREES, name, tree)


@pytest.mark.parametrize(
    ("fault", "check"), FAULTS, ids=[f"{place}-{fault.__name__}" for place, (fault, _) in enumerate(FAULTS)]
)
def test_a_planted_fault_is_caught(
    fault: Callable[[Patch], None], check: Callable[[], object], monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patch:
        fault(patch)
        try:
            check()
        except (AssertionError, IndexError, RuntimeError):
            return
    pytest.fail(f"the check passes although {fault.__name__.replace('_', ' ')}")


@pytest.mark.parametrize("tree", ["sage_deep"])
def test_the_independence_check_passes_without_a_fault(tree: str) -> None:
    sampled_independence(tree)()
