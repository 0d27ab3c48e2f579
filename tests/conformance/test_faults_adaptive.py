"""Planted faults of adaptive trees and prompt lookup: each must make its check fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import decoding.trees.sage as sage
from decoding import Sampling
from decoding.drafters import LookupDrafter
from decoding.tree import DraftTree
from decoding.trees import SageTree
from tests.conformance import checks, planted, test_adaptive
from tests.conformance.planted import Patch
from tests.decoding import test_adaptive_steps

pytestmark = pytest.mark.slow


def padding_is_offered_as_drafts(patch: Patch) -> None:
    finish = SageTree.finish

    def all_valid(self: SageTree) -> DraftTree:
        tree = finish(self)
        return replace(tree, valid=torch.ones_like(tree.valid), parents=tree.parents.clamp_min(0))

    patch.setattr(SageTree, "finish", all_valid)


def all_rows_use_the_plan_of_one_row(patch: Patch) -> None:
    plan = sage.plan_tree

    def first_only(probs: Any, alpha: Any, max_depth: Any, settings: Any) -> Any:
        rows = torch.zeros_like(max_depth)
        return plan(probs[rows], alpha[rows], max_depth[rows], settings)

    patch.setattr(sage, "plan_tree", first_only)


def a_refilled_slot_keeps_the_former_samples_tree(patch: Patch) -> None:
    patch.setattr(SageTree, "reset", lambda self, slots: None)


def the_bonus_token_counts_as_accepted(patch: Patch) -> None:
    learn = sage.Confidence.learn
    patch.setattr(
        sage.Confidence,
        "learn",
        lambda self, slots, alpha, result: learn(self, slots, alpha, replace(result, n=result.n + 1)),
    )


def lookup_omits_accepted_tokens(patch: Patch) -> None:
    patch.setattr(LookupDrafter, "commit", lambda self, verification, result: None)


def sampled_independence(tree: str, family: str = "llava", count: int = 8) -> Callable[[], object]:
    return lambda: checks.check_independence(family, tree, Sampling(), count)


def repeats() -> None:
    test_adaptive.test_lookup_accepts_most_of_a_text_that_repeats("latest", SageTree)


FAULTS: list[planted.Fault] = [
    (padding_is_offered_as_drafts, test_adaptive_steps.test_padding_is_masked_and_attends_only_to_itself),
    (all_rows_use_the_plan_of_one_row, test_adaptive_steps.test_rows_of_one_batch_get_trees_of_their_own_shape),
    (all_rows_use_the_plan_of_one_row, sampled_independence("sage_deep")),
    (a_refilled_slot_keeps_the_former_samples_tree, sampled_independence("sage_deep", "llama", 20)),
    (
        the_bonus_token_counts_as_accepted,
        test_adaptive_steps.test_history_lowers_and_raises_the_deepest_tree_once_its_window_is_full,
    ),
    (lookup_omits_accepted_tokens, repeats),
]


@pytest.fixture(autouse=True)
def known_to_the_checks(monkeypatch: Patch) -> None:
    for name, tree in test_adaptive.TREES.items():
        monkeypatch.setitem(checks.TREES, name, tree)


@planted.each(FAULTS)
def test_a_planted_fault_is_caught(fault: planted.Plant, check: planted.Check) -> None:
    planted.assert_caught(fault, check)
