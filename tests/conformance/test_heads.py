"""Heads with every tree: the output equals the target's, and drafts equal those of slow heads."""

from __future__ import annotations

import pytest

from decoding import Sampling
from decoding.acceptance import Rejection
from decoding.trees import DynamicTree
from tests.conformance import checks, heads
from tests.covering import tiers

pytestmark = pytest.mark.slow

KINDS = ("eagle", "eagle3", "vispec", "msd", "medusa")
MIXED = Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3)
SAMPLINGS = {"greedy": Sampling(), "sampled": MIXED}


@pytest.mark.parametrize(
    ("kind", "family", "tree", "slots"),
    [
        ("eagle", "llava", "dynamic", 4),
        ("eagle", "llava", "chain", 9),
        ("eagle", "qwen2_5_vl", "dynamic", 4),
        ("eagle3", "llama", "dynamic", 1),
        ("eagle3", "llava", "ragged", 9),
        ("eagle3", "qwen3_vl", "dynamic", 4),
        ("eagle3-axes", "qwen2_5_vl", "dynamic", 4),
        ("eagle3-axes", "qwen2_5_vl", "chain", 9),
        ("peagle", "llama", "dynamic", 1),
        ("peagle", "llava", "ragged", 9),
        ("peagle", "qwen2_5_vl", "chain", 4),
        ("medusa", "llava", "dynamic", 9),
        ("medusa", "llava", "branching", 1),
        ("medusa", "qwen2_5_vl", "ragged", 4),
    ],
)
def test_greedy_output_equals_generate(kind: str, family: str, tree: str, slots: int) -> None:
    heads.check_greedy(kind, family, tree, slots)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_rejected_at_several_depths_and_later_siblings_are_accepted(kind: str) -> None:
    rule = heads.check_greedy(kind, "llava", "dynamic", 4)
    assert len(rule.rejected_at) >= 2
    assert max(rule.ranks_taken) >= 1


@pytest.mark.parametrize(
    ("kind", "family", "tree"),
    [
        ("eagle", "llava", "dynamic"),
        ("eagle3", "llava", "dynamic"),
        ("eagle3-axes", "qwen2_5_vl", "branching"),
        ("peagle", "llava", "dynamic"),
        ("medusa", "llava", "dynamic"),
    ],
)
def test_sampled_output_equals_plain_sampling_under_shared_noise(kind: str, family: str, tree: str) -> None:
    assert heads.check_sampled(kind, family, tree, MIXED) > 1.2


@tiers(
    "kind, tree, sampling",
    [
        ("eagle", "dynamic"),
        ("eagle3", "ragged"),
        ("peagle", "dynamic"),
        ("vispec", "dynamic"),
        ("msd", "ragged"),
        ("medusa", "dynamic"),
    ],
    list(SAMPLINGS),
    strength=1,
)
def test_acceptance_of_a_sample_in_a_batch_equals_its_acceptance_alone(kind: str, tree: str, sampling: str) -> None:
    heads.check_independence(kind, "llava", tree, SAMPLINGS[sampling])


@pytest.mark.parametrize(
    ("kind", "family", "tree"),
    [
        ("eagle", "llama", "dynamic"),
        ("vispec", "llava", "dynamic"),
        ("medusa", "llama", "chain"),
    ],
)
def test_a_text_ends_at_its_eos_wherever_in_the_tree_it_falls(kind: str, family: str, tree: str) -> None:
    heads.check_eos(kind, family, tree)


@pytest.mark.parametrize(
    ("kind", "family", "tree"),
    [
        ("eagle", "llama", "ragged"),
        ("eagle", "llava", "dynamic"),
        ("eagle", "qwen2_5_vl", "chain"),
        ("eagle3", "llava", "ragged"),
        ("eagle3-axes", "qwen2_5_vl", "dynamic"),
        ("peagle", "llava", "dynamic"),
        ("vispec", "llava", "ragged"),
        ("vispec", "qwen2_5_vl", "dynamic"),
        ("msd", "llava", "dynamic"),
        ("msd", "qwen2_5_vl", "chain"),
    ],
)
def test_the_heads_kv_cache_equals_a_fresh_encoding_with_the_targets_features(
    kind: str, family: str, tree: str
) -> None:
    heads.check_memory(family, tree, kind=kind)


@pytest.mark.parametrize(
    ("kind", "family", "tree"),
    [
        ("eagle", "llava", "dynamic"),
        ("eagle", "llava", "ragged"),
        ("eagle3", "llava", "dynamic"),
        ("eagle3-axes", "qwen2_5_vl", "ragged"),
        ("peagle", "llava", "dynamic"),
        ("peagle", "llama", "ragged"),
        ("vispec", "llava", "dynamic"),
        ("vispec", "qwen2_5_vl", "ragged"),
        ("msd", "llava", "ragged"),
        ("msd", "qwen2_5_vl", "dynamic"),
        ("medusa", "llava", "dynamic"),
        ("medusa", "llava", "chain"),
    ],
)
def test_every_draft_equals_that_of_a_slow_head(kind: str, family: str, tree: str) -> None:
    heads.check_drafts(kind, family, tree)


def test_a_model_may_draft_a_dynamic_tree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.TREES, "dynamic", heads.TREES["dynamic"])
    checks.check_greedy("llava", "dynamic", "perturbed", 4)
    checks.check_cache("llama", "dynamic", "perturbed")


@pytest.mark.parametrize("drafter", ["perturbed", "loose"])
def test_rejection_over_a_dynamic_tree_draws_from_the_targets_distribution(drafter: str) -> None:
    assert checks.joint_of_two_tokens(lambda: DynamicTree(3, 1, 6), Rejection(), 3000, drafter) < 2.1


def test_rejection_over_a_dynamic_tree_is_greedy_decoding_at_temperature_zero() -> None:
    heads.check_greedy("eagle", "llava", "dynamic", 4, rule=Rejection())
