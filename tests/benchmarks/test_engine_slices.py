"""Tests interleaved passes of fake engines that generate a given number of tokens in a given time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine import slices as engine_slices
from benchmarks.engine.slices import run_side_by_side
from benchmarks.harness.clock import KINDS, Reading
from decoding import Completion, Request, RequestError, Telemetry
from decoding.stats import EngineStats


class Clock:
    """A simulated clock that advances only when an engine works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(engine_slices.time, "perf_counter", lambda: self.now)


class Worker:
    """A fake engine with one slot: a step takes `step_s` and gives the request in it `per_step` tokens, of
    `length` that it gets."""

    def __init__(self, name: str, clock: Clock, log: list[str], step_s: float, per_step: int, length: int = 12) -> None:
        self.name, self.clock, self.log = name, clock, log
        self.step_s, self.per_step, self.length = step_s, per_step, length
        self.stats = EngineStats()
        self.waiting: list[Request] = []
        self._slots = SimpleNamespace(progress=[None])
        self.error: RequestError | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self._slots.progress[0] is not None

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self) -> list[Completion]:
        self.clock.now += self.step_s
        self.log.append(self.name)
        self.stats.num_steps += 1
        self.stats.verify_s += self.step_s
        if self._slots.progress[0] is None:
            self._slots.progress[0] = SimpleNamespace(request=self.waiting.pop(0), token_ids=[])
        one = self._slots.progress[0]
        one.token_ids += [7] * min(self.per_step, self.length - len(one.token_ids))
        if len(one.token_ids) < self.length:
            return []
        self._slots.progress[0] = None
        tokens, error = tuple(one.token_ids), self.error
        telemetry = Telemetry(num_spec_steps=2, num_accepted_draft_tokens=3, acceptance_histogram=(1, 1))
        return [Completion(one.request.sample_id, tokens, num_input_tokens=10, telemetry=telemetry, error=error)]


class Forwards:
    """A clock of forwards that are as long as the reads before them are many."""

    def __init__(self) -> None:
        self.num_reads = 0

    def read(self) -> dict[str, Reading]:
        self.num_reads += 1
        return {kind: Reading(seconds=float(self.num_reads)) for kind in KINDS}


def workers(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> dict[str, Any]:
    clock = Clock(monkeypatch)
    slow, quick = Worker("slow", clock, log, 0.25, 1), Worker("quick", clock, log, 0.375, 3)
    return {one.name: (one, Forwards()) for one in (slow, quick)}


REQUESTS = [Request("a", "?"), Request("b", "?")]


def test_the_engine_with_the_fewest_tokens_gets_the_next_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    run_side_by_side(workers(monkeypatch, log), ("quick", "slow"), REQUESTS)
    # A slice is two steps of either: six tokens, then two at a time until both are equal; then the first continues.
    first = ["quick"] * 2 + ["slow"] * 6
    assert log == first * 4
    log.clear()
    run_side_by_side(workers(monkeypatch, log), ("slow", "quick"), REQUESTS)
    assert log[:12] == ["slow"] * 2 + ["quick"] * 2 + ["slow"] * 6 + ["quick"] * 2


def test_a_pass_has_the_time_of_its_own_slices_and_all_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = workers(monkeypatch, [])
    for _ in range(2):
        # What an engine did before is not the pass'.
        made = run_side_by_side(engines, ("slow", "quick"), REQUESTS)
        assert list(made) == ["slow", "quick"]
        assert [one.outcome.seconds for one in made.values()] == pytest.approx([24 * 0.25, 8 * 0.375])
        assert [one.phases_s["verify_s"] for one in made.values()] == pytest.approx([24 * 0.25, 8 * 0.375])
        assert [one.num_steps for one in made.values()] == [24, 8]
        assert all(one.outcome.outputs == [[7] * 12] * 2 for one in made.values())
        assert made["quick"].histogram == [2, 2]
        assert made["quick"].typical_length == 16
    # The clock is read before and after each pass; a step has forwards of target and drafter.
    assert (made["slow"].step_forwards_s, made["slow"].prompt_forwards_s) == (8.0, 4.0)


def test_a_request_that_fails_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = workers(monkeypatch, [])
    engines["quick"][0].error = RequestError("row_timeout", "too slow")
    with pytest.raises(RuntimeError, match="2 requests failed"):
        run_side_by_side(engines, ("slow", "quick"), REQUESTS)
