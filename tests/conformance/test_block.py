"""Block drafters: their drafts, their KV cache after every step, and steps without drafts."""

from __future__ import annotations

import pytest

import decoding.drafters.missed as missed
from decoding import Engine, Method, Sampling
from decoding.acceptance import Exact
from decoding.trees import Chain
from models.inputs.processing import PromptError
from tests import toys
from tests.conformance import block, checks
from tests.conformance.catch_up import LONG, MIXED
from tests.conformance.erratic import unsettled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "tree"),
    [("llama", "chain"), ("llama", "branching"), ("llama", "dynamic"), ("llava", "ragged"), ("qwen2_5_vl", "chain")],
)
def test_every_level_is_that_of_the_slow_network_over_the_targets_own_states(family: str, tree: str) -> None:
    block.check_drafts(family, tree)


@pytest.mark.parametrize("views", block.VIEWS)
def test_layers_with_windows_read_what_the_slow_network_reads(views: str) -> None:
    block.check_drafts("llama", "branching", block.VIEWS[views])


@pytest.mark.parametrize(("family", "tree"), [("llama", "dynamic"), ("llava", "chain"), ("qwen2_5_vl", "branching")])
def test_the_cache_equals_a_fresh_encoding_after_every_step(family: str, tree: str) -> None:
    block.check_memory(block.make_engine(family, tree, 3), family, checks.requests(family, 10))


def engine_with_pauses(pattern: list[int], family: str = "llama") -> Engine:
    target = toys.target(family)
    method = Method(block.make_drafter(family, target), Chain(4), Exact())
    return Engine(target, unsettled(method, pattern=pattern), 3, 128)


@pytest.mark.parametrize("widest", [2, 4, missed.WIDEST])
@pytest.mark.parametrize("pattern", [LONG, MIXED, [1, 0]], ids=str)
def test_drafts_and_cache_are_right_after_any_number_of_steps_without_drafts(
    pattern: list[int], widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missed, "WIDEST", widest)
    monkeypatch.setattr("decoding.drafters.model.WIDEST", widest)
    wanted = checks.requests("llama", 5, Sampling(ignore_eos=True), longest=34)
    engine = engine_with_pauses(pattern)
    counted = block.watch_drafts(engine, "llama")
    checks.run(engine, wanted)
    assert counted[0] > 5
    block.check_memory(engine_with_pauses(pattern), "llama", wanted)


def test_one_forward_drafts_all_levels_and_a_drafter_that_is_off_runs_none() -> None:
    engine = block.make_engine("llama", "chain", 1)
    done = checks.run(engine, checks.requests("llama", 3))
    for completion in done.values():
        assert completion.telemetry.drafter_forwards <= completion.telemetry.num_spec_steps
    assert engine.method.drafter.num_forwards > 0
    engine = engine_with_pauses([0])
    done = checks.run(engine, checks.requests("llama", 4))
    assert engine.method.drafter.num_forwards == 0
    assert all(completion.telemetry.num_draft_tokens == 0 for completion in done.values())


@pytest.mark.parametrize("pattern", [[4], [0, 0, 2], LONG], ids=str)
def test_a_prompt_that_fails_late_disables_drafts_of_its_row_only(
    pattern: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = checks.requests("llama", 5, Sampling(ignore_eos=True), longest=34)
    engine = engine_with_pauses(pattern)
    drafter = engine.method.drafter

    def refused(request, prefill_output):  # type: ignore[no-untyped-def]
        if request.sample_id in ("sample-1", "sample-3"):
            raise PromptError("no such words")
        return []

    monkeypatch.setattr(drafter, "prefixes", refused)
    done = checks.run(engine, wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated("llama", request, frozenset())
        assert done[request.sample_id].telemetry.degraded == (request.sample_id in ("sample-1", "sample-3"))
