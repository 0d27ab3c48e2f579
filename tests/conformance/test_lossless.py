"""Tests losslessness: with every drafter, the output equals the target's."""

from __future__ import annotations

from itertools import product

import pytest

from decoding import Sampling
from tests.conformance import checks
from tests.covering import tiers

FAMILIES = ("llama", "llava")
DRAFTERS = [("none", "chain"), *product(("right", "perturbed", "wrong"), checks.TREES)]
SAMPLED = {
    "plain temperature": Sampling(temperature=0.7),
    "top-k": Sampling(temperature=1.3, top_k=9),
    "top-p": Sampling(temperature=1.0, top_p=0.8),
    "all filters and a penalty": Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3),
    "greedy with a penalty": Sampling(repetition_penalty=1.2),
}


@tiers("family, drafter, tree, slots", FAMILIES, DRAFTERS, [1, 4, 9])
def test_greedy_output_equals_generate(family: str, tree: str, drafter: str, slots: int) -> None:
    checks.check_greedy(family, tree, drafter, slots)


@pytest.mark.parametrize("tree", list(checks.TREES))
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_the_perturbed_drafter_are_rejected_at_every_depth_and_later_siblings_are_accepted(
    family: str, tree: str
) -> None:
    rule = checks.check_greedy(family, tree, "perturbed", 9, count=24)
    assert rule.rejected_at >= set(range(1, checks.TREES[tree]().max_levels + 1))
    if tree != "chain":
        assert max(rule.ranks_taken) >= 1


@tiers("family, tree, kind", FAMILIES, list(checks.TREES), list(SAMPLED))
def test_sampled_output_equals_plain_sampling_under_shared_noise(family: str, tree: str, kind: str) -> None:
    acceptance_length = checks.check_sampled(family, tree, "perturbed", 4, SAMPLED[kind])
    assert acceptance_length > 1.2, "the drafter shares the noise, so it must often be right"


@pytest.mark.parametrize("drafter", ["none", "right", "wrong"])
def test_sampled_output_does_not_depend_on_the_drafter(drafter: str) -> None:
    checks.check_sampled("llava", "branching", drafter, 4, SAMPLED["top-k"])


@tiers("family, tree", FAMILIES, list(checks.TREES))
def test_a_text_ends_at_its_eos_wherever_in_the_tree_it_falls(family: str, tree: str) -> None:
    checks.check_eos_at_every_depth(family, tree)


@tiers("family, drafter, tree", FAMILIES, [case for case in DRAFTERS if case[0] != "wrong"])
def test_the_kv_cache_of_every_row_equals_a_fresh_prefill(family: str, tree: str, drafter: str) -> None:
    checks.check_cache(family, tree, drafter)


@pytest.mark.slow_cases("branching-greedy", "chain")
@pytest.mark.parametrize("kind", ["greedy", "all filters and a penalty"])
@pytest.mark.parametrize("tree", list(checks.TREES))
def test_output_and_acceptance_do_not_depend_on_batch_order_or_slot(tree: str, kind: str) -> None:
    checks.check_independence("llava", tree, SAMPLED.get(kind, Sampling()))


@pytest.mark.slow_cases("llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stop_string_ends_the_text_and_is_cut_off(family: str) -> None:
    checks.check_stop_strings(family)
