"""Trees of a different shape per row, and prompt lookup: the output equals the target's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact, Rejection
from decoding.contracts import Drafter, TreePolicy
from decoding.drafters import LookupDrafter, NoDrafter
from decoding.trees import Chain, DynamicTree, OnlineSageTree, SageSettings, SageTree
from models.target import Target
from tests import toys
from tests.conformance import checks, heads

pytestmark = pytest.mark.slow

# The toys' distributions are flat, so these depths and a lower threshold are needed for deep trees.
DEEP = SageSettings(min_depth=5, threshold_scale=0.004, history_window=3, history_high=1.0, history_low=0.3)
TREES: dict[str, Callable[[], TreePolicy]] = {
    "sage": SageTree,
    "sage_deep": lambda: SageTree(DEEP),
    "sage_node": lambda: SageTree(SageSettings(threshold="node", source="mean", max_nodes=30, depth_cap=10)),
    "sage_leaf": lambda: SageTree(replace(DEEP, source="accepted_leaf", max_expanded=4)),
    "sage_online": lambda: OnlineSageTree(DEEP),
    "sage_small": lambda: SageTree(SageSettings(max_nodes=25, top_k=4, max_width=4, max_expanded=4)),
    "dynamic": lambda: DynamicTree(4, 3, 20),
}
SAMPLED = {
    "plain temperature": Sampling(temperature=0.7),
    "all filters and a penalty": Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3),
}


@pytest.fixture(autouse=True)
def known_to_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tree in TREES.items():
        monkeypatch.setitem(checks.TREES, name, tree)
    make = checks.make_drafter

    def make_with_lookup(kind: str, family: str) -> Drafter:
        return LookupDrafter() if kind == "lookup" else make(kind, family)

    monkeypatch.setattr(checks, "make_drafter", make_with_lookup)


@pytest.mark.parametrize(
    ("family", "tree", "drafter", "slots"),
    [
        ("llava", "sage_deep", "right", 4),
        ("llama", "sage_deep", "perturbed", 9),
        ("llama", "sage_node", "perturbed", 4),
        ("llava", "sage_leaf", "perturbed", 4),
        ("llava", "sage_online", "right", 1),
        ("llava", "ragged", "lookup", 9),
        ("llama", "dynamic", "lookup", 4),
    ],
)
def test_greedy_output_equals_generate(family: str, tree: str, drafter: str, slots: int) -> None:
    rule = checks.check_greedy(family, tree, drafter, slots)
    if tree == "sage_deep" and drafter == "perturbed":
        assert max(rule.ranks_taken) >= 1
        assert max(rule.rejected_at) >= 3


@pytest.mark.parametrize("kind", list(SAMPLED))
@pytest.mark.parametrize(
    ("family", "tree", "drafter"),
    [
        ("llava", "sage_deep", "perturbed"),
        ("llava", "sage", "wrong"),
        ("llama", "branching", "lookup"),
    ],
)
def test_sampled_output_equals_plain_sampling_under_shared_noise(
    family: str, tree: str, drafter: str, kind: str
) -> None:
    acceptance_length = checks.check_sampled(family, tree, drafter, 4, SAMPLED[kind])
    if drafter == "perturbed":
        assert acceptance_length > 1.2, "the drafter shares the noise, so it must often be right"


def test_a_text_ends_at_its_eos_wherever_in_the_tree_it_falls() -> None:
    checks.check_eos_at_every_depth("llama", "sage")


@pytest.mark.parametrize(("tree", "drafter"), [("sage_deep", "perturbed"), ("sage_online", "right")])
def test_the_kv_cache_of_every_row_equals_a_fresh_prefill(tree: str, drafter: str) -> None:
    checks.check_cache("llava", tree, drafter)


@pytest.mark.parametrize(
    ("tree", "kind"),
    [("sage", "greedy"), ("sage_node", "all filters and a penalty"), ("sage_leaf", "greedy")],
)
def test_output_and_acceptance_do_not_depend_on_batch_order_or_slot(tree: str, kind: str) -> None:
    checks.check_independence("llava", tree, SAMPLED.get(kind, Sampling()))


@pytest.mark.parametrize(("tree", "drafter"), [("sage_small", "loose"), ("ragged", "lookup")])
def test_rejection_sampling_keeps_the_targets_distribution(tree: str, drafter: str) -> None:
    assert checks.joint_of_two_tokens(checks.TREES[tree], Rejection(), 3000, drafter) < 2.1


def test_drafts_of_the_target_itself_are_accepted_to_the_depth_of_the_tree() -> None:
    method = Method(checks.make_drafter("right", "llama"), SageTree(DEEP), Exact())
    wanted = [
        replace(request, sampling=Sampling(max_new_tokens=40, ignore_eos=True))
        for request in checks.requests("llama", 5)
    ]
    taken = [
        completion.telemetry for completion in checks.run(Engine(toys.target("llama"), method, 3, 128), wanted).values()
    ]
    # All first children are right, so a step accepts as many drafts as its tree is deep.
    for result in taken:
        depth = result.extras["tree_depth_mean"]
        assert result.num_accepted_draft_tokens >= result.num_spec_steps * depth - 1e-3 - int(result.ended_inside_path)
        assert depth > 1


def test_an_adaptive_tree_reports_its_mean_shape() -> None:
    target = toys.target("llama")
    request = Request("one", *toys.prompt("llama", 3), Sampling(max_new_tokens=30, ignore_eos=True))
    sure = Method(checks.make_drafter("right", "llama"), SageTree(), Exact())
    telemetries = checks.run(Engine(target, sure, 1, 128), [request])["one"].telemetry.extras
    assert 1 <= telemetries["tree_depth_mean"] <= 8
    assert 1 <= telemetries["tree_width_mean"] <= 10
    assert 0 < telemetries["confidence_mean"] < 1


def without_attention() -> Target:
    """A target whose next token depends only on the last one, so that greedy texts repeat."""
    target = toys.target("llama")
    with torch.no_grad():
        for layer in target.decoder.layers:  # type: ignore[union-attr]
            layer.self_attn.o_proj.weight.zero_()
    return target


@pytest.mark.parametrize("tree", [lambda: Chain(6), SageTree], ids=["chain", "sage"])
@pytest.mark.parametrize("match", ["latest", "first"])
def test_lookup_accepts_most_of_a_text_that_repeats(match: Any, tree: Callable[[], TreePolicy]) -> None:
    request = Request("one", *toys.prompt("llama", 4), Sampling(max_new_tokens=80, ignore_eos=True))
    plain = checks.run(Engine(without_attention(), Method(NoDrafter(), Chain(1), Exact()), 1, 160), [request])["one"]
    method = Method(LookupDrafter(match=match), tree(), Exact())
    done = checks.run(Engine(without_attention(), method, 1, 160), [request])["one"]
    assert done.token_ids == plain.token_ids
    assert len(set(done.token_ids[40:])) < 20, "the text goes round in a circle"
    assert done.telemetry.mean_acceptance_length > 3.0
    assert done.telemetry.drafter_forwards == 0
    assert done.telemetry.extras["lookup_match_rate"] > 0.5


def test_eagles_head_drafts_the_adaptive_tree() -> None:
    target = toys.target("llama")
    method = Method(heads.make_drafter("eagle", target), SageTree(DEEP), Exact())
    wanted = checks.requests("llama", 6)
    done = checks.run(Engine(target, method, 4, 128), wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated("llama", request, target.eos_ids)
