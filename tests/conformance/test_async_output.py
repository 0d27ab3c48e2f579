"""Asynchronous output processing gives the same outputs and telemetry."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding import Completion, Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.drafters import NoDrafter
from decoding.trees import Chain
from models.inputs.processing import PromptError
from tests import toys
from tests.conformance import catch_up, checks, images, methods
from tests.conformance.erratic import Erratic, unsettled
from tests.covering import tiers

pytestmark = pytest.mark.slow


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enables asynchronous output processing in all engines."""
    monkeypatch.setattr(Engine, "__init__", functools.partialmethod(Engine.__init__, async_output=True))


@tiers("name, mode", list(methods.METHODS), list(methods.MODES), strength=1)
def test_every_method_gives_the_targets_output(name: str, mode: str, late: None) -> None:
    families = methods.METHODS[name][1]
    methods.check_case((name, "llava" if "llava" in families else families[0], 4, mode), count=8)


def summary(completion: Completion) -> tuple[Any, ...]:
    telemetry = completion.telemetry
    return (
        completion.token_ids,
        completion.finish_reason,
        completion.mean_logprob,
        telemetry.num_spec_steps,
        telemetry.num_draft_tokens,
        telemetry.acceptance_histogram,
        telemetry.num_relaxed_accepts,
        telemetry.ended_inside_path,
        telemetry.target_forwards,
    )


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", ["plain", "sd-chain", "dynamic", "tabed", "sage", "lookup", "jacobi"])
def test_telemetry_equals_that_of_synchronous_output_processing(name: str, slots: int) -> None:
    make, _ = methods.METHODS[name]
    wanted = checks.requests("llava", 9)
    results = []
    for async_output in (False, True):
        engine = Engine(toys.target("llava"), make("llava"), slots, 160, async_output=async_output)
        results.append({key: summary(completion) for key, completion in checks.run(engine, wanted).items()})
        assert engine._slots.free == list(range(slots))
        assert engine._in_flight is None
    for key, values in results[0].items():
        assert values[2] == pytest.approx(results[1][key][2], rel=1e-4)
        assert values[:2] + values[3:] == results[1][key][:2] + results[1][key][3:], key


def endless(limit: int) -> list[Request]:
    return checks.requests("llama", 7, Sampling(ignore_eos=True), longest=limit)


def test_texts_of_a_fixed_length_take_no_extra_step_of_plain_decoding() -> None:
    steps = []
    for async_output in (False, True):
        engine = Engine(toys.target("llama"), Method(NoDrafter(), Chain(1), Exact()), 3, 96, async_output=async_output)
        checks.run(engine, endless(30))
        steps.append(engine.stats.num_slot_steps)
    assert steps[0] == steps[1]


def test_a_row_that_ended_in_an_unprocessed_step_runs_one_step_more_and_frees_its_slot() -> None:
    late, at_once = (
        Engine(toys.target("llava"), Method(NoDrafter(), Chain(1), Exact()), 2, 160, async_output=async_output)
        for async_output in (True, False)
    )
    wanted = checks.requests("llava", 24)
    done, expected = checks.run(late, wanted), checks.run(at_once, wanted)
    ended_by_eos = sum(
        completion.finish_reason == "stop" and len(completion.token_ids) > 1 for completion in expected.values()
    )
    assert ended_by_eos > 0
    assert {key: completion.token_ids for key, completion in done.items()} == {
        key: completion.token_ids for key, completion in expected.items()
    }
    assert 0 < late.stats.num_slot_steps - at_once.stats.num_slot_steps <= ended_by_eos


def test_a_step_is_launched_before_the_previous_one_is_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(toys.target("llama"), Method(NoDrafter(), Chain(1), Exact()), 2, 96, async_output=True)
    seen: list[str] = []
    launch, process = engine._launch, engine._process

    def launched() -> Any:
        seen.append("launch")
        return launch()

    def processed(*step: Any) -> Any:
        seen.append("process")
        return process(*step)

    monkeypatch.setattr(engine, "_launch", launched)
    monkeypatch.setattr(engine, "_process", processed)
    engine.submit(replace(endless(30)[2], sample_id="one"))
    for _ in range(3):
        engine.step()
    assert seen == ["launch", "launch", "process", "launch", "process"]
    assert engine.has_work


@pytest.mark.parametrize("pattern", [[0], [4], catch_up.LONG, catch_up.MIXED], ids=str)
def test_every_sequence_of_depths_gives_the_targets_output(pattern: list[int], late: None) -> None:
    engine, _ = catch_up.unsettled_engine(pattern)
    wanted = catch_up.long_requests()
    done = checks.run(engine, wanted)
    for request in wanted:
        expected = checks.generated("llama", replace(request), frozenset())
        assert done[request.sample_id].token_ids == expected


@pytest.mark.parametrize("method", ["plain", "eagle2", "sd-chain"])
def test_no_row_of_an_image_runs_beyond_its_length(method: str, late: None) -> None:
    images.check_equal(method, "class", 4, "sampled-guided")


@pytest.mark.parametrize("async_output", [False, True])
def test_the_seconds_of_all_phases_sum_to_at_most_the_elapsed_time(async_output: bool) -> None:
    engine = Engine(toys.target("llama"), Method(NoDrafter(), Chain(1), Exact()), 2, 96, async_output=async_output)
    start = time.perf_counter()
    checks.run(engine, endless(30))
    spent, stats = time.perf_counter() - start, engine.stats
    phases = (stats.encode_s, stats.prefill_s, stats.draft_s, stats.verify_s, stats.commit_s)
    assert all(phase >= 0 for phase in phases)
    assert sum(phases) <= spent


def test_steps_on_the_cpu_are_processed_synchronously() -> None:
    engine = Engine(toys.target("llama"), Method(NoDrafter(), Chain(1), Exact()), 2, 96)
    engine.submit(endless(30)[0])
    engine.step()
    assert engine._in_flight is None
    (progress,) = (request_state for request_state in engine._slots.progress if request_state is not None)
    assert len(progress.token_ids) == 2


def poison(target: Any, number: int) -> Callable[..., Any]:
    """NaN logits in every forward from a given one on."""
    head, calls = target.head.forward, [0]

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        out: torch.Tensor = head(hidden)
        return out * torch.nan if calls[0] > number else out

    return forward


def test_rows_with_nan_logits_and_rows_past_their_time_limit_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target("llama")
    engine = Engine(target, Method(NoDrafter(), Chain(1), Exact()), 3, 96, async_output=True)
    monkeypatch.setattr(target.head, "forward", poison(target, 4))
    wanted = endless(30)
    done = list(engine.run(wanted))
    assert sorted(completion.sample_id for completion in done) == sorted(request.sample_id for request in wanted)
    assert {completion.error.code for completion in done if completion.error} == {"non_finite_logits"}
    monkeypatch.undo()
    slow = Engine(target, Method(NoDrafter(), Chain(1), Exact()), 3, 96, max_row_s=1e-9, async_output=True)
    done = list(slow.run(wanted))
    assert sorted(completion.sample_id for completion in done) == sorted(request.sample_id for request in wanted)
    assert {completion.error.code for completion in done if completion.error} == {"row_timeout"}


def test_outputs_are_exact_if_all_drafts_are_accepted_with_asynchronous_output_processing() -> None:
    # Every draft is accepted, so a text crosses the end of the window by several positions at once.
    wanted = [replace(request, sampling=Sampling(max_new_tokens=150, ignore_eos=True)) for request in endless(30)]
    method = Method(checks.make_drafter("right", "llama"), Chain(5), Exact())
    done = checks.run(Engine(toys.target("llama"), method, 3, 200, async_output=True), wanted)
    assert any(completion.telemetry.mean_acceptance_length > 5 for completion in done.values())
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated("llama", request, frozenset())


def test_a_drafter_that_refuses_late_refuses_no_row_that_has_ended() -> None:
    plain = Engine(toys.target("llava"), Method(NoDrafter(), Chain(1), Exact()), 1, 160)
    wanted = checks.requests("llava", 24)
    expected = next(
        completion
        for completion in plain.run(wanted)
        if completion.finish_reason == "stop" and len(completion.token_ids) > 2
    )
    drafter = checks.make_drafter("perturbed", "llava")

    def refuse(*_: Any) -> Any:
        raise PromptError("no such words")

    drafter.prefixes = refuse  # type: ignore[method-assign]
    # The first drafts are requested after the text has ended, before its output is processed.
    pattern = [0] * len(expected.token_ids) + [2]
    method = unsettled(Method(drafter, Chain(4), Exact()), pattern=pattern)
    assert isinstance(method.controller, Erratic)
    method.controller.is_off = True
    late = Engine(toys.target("llava"), method, 1, 160, async_output=True)
    (done,) = late.run([next(request for request in wanted if request.sample_id == expected.sample_id)])
    assert method.controller.num_asked == len(expected.token_ids)
    assert done.error is None
    assert done.token_ids == expected.token_ids
