"""Self-speculation over the target's KV cache: its drafts, the cache after each step, and steps without drafts."""

from __future__ import annotations

import pytest

from decoding import Engine, Method
from decoding.acceptance import Exact
from decoding.drafters import LayerSkipDrafter
from decoding.trees import Chain
from tests import toys
from tests.conformance import checks, layer_skip
from tests.conformance.catch_up import LONG, MIXED
from tests.conformance.erratic import unsettled

pytestmark = pytest.mark.slow

DEEP = ("llava", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Families with images; positions on three axes; visual features that are added behind early layers."""


@pytest.mark.parametrize(
    ("family", "layers", "tree"),
    [
        *((family, [0], "chain") for family in DEEP),
        ("qwen3_vl", [1], "branching"),
        ("deep", [0, 1], "branching"),
        ("deep", [0, 3], "ragged"),
        ("deep", [1, 2, 3], "chain"),
        ("deep", [2], "pruned"),
    ],
)
def test_every_draft_is_that_of_the_named_layers_over_the_targets_cache(
    family: str, layers: list[int], tree: str
) -> None:
    layer_skip.check_drafts(family, layers, tree)


@pytest.mark.parametrize(("kind", "tree"), [("text", "branching"), ("class", "chain")])
def test_every_draft_of_a_guided_image_is_that_of_the_first_layer_on_both_lanes(kind: str, tree: str) -> None:
    layer_skip.check_image_drafts(kind, tree)


@pytest.mark.parametrize(
    ("family", "layers", "tree"), [*((family, [0], "pruned") for family in DEEP), ("deep", [0, 2], "branching")]
)
def test_the_targets_cache_equals_a_fresh_prefill_after_every_step(family: str, layers: list[int], tree: str) -> None:
    layer_skip.check_cache(family, layers, tree)


@pytest.mark.parametrize("tree", list(layer_skip.TREES))
def test_nan_at_the_positions_of_drafts_changes_no_output(tree: str) -> None:
    layer_skip.check_poisoned("qwen3_vl", tree)


@pytest.mark.parametrize("tree", list(layer_skip.TREES))
def test_an_output_may_fill_the_context(tree: str) -> None:
    layer_skip.check_full_context(tree)


@pytest.mark.parametrize("pattern", [[0], LONG, MIXED], ids=str)
def test_steps_without_drafts_cost_the_drafter_nothing(pattern: list[int]) -> None:
    drafter = LayerSkipDrafter([0])
    target = toys.target("llama")
    engine = Engine(target, unsettled(Method(drafter, Chain(4), Exact()), pattern=pattern), 3, 128)
    wanted = checks.requests("llama", 6)
    done = checks.run(engine, wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated("llama", request, target.eos_ids)
    # One forward per level and nothing else: no prompt, and no token of a step without drafts.
    controller = engine.method.controller
    assert drafter.num_forwards == sum(outcome.levels for outcome in controller.outcomes)  # type: ignore[attr-defined]


def test_every_forward_of_the_drafter_is_counted() -> None:
    engine = layer_skip.make_engine("llama", [0], "chain", 1)
    done = checks.run(engine, checks.requests("llama", 1))["sample-0"]
    assert 0 < done.telemetry.drafter_forwards == engine.method.drafter.num_forwards
    assert done.telemetry.drafter_forwards >= done.telemetry.num_draft_tokens
