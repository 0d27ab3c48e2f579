"""The verdict of a pilot: phases, ceiling and recommendation follow from the costs of fake engines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from actors.auto.trial import MAX_LONGER, MethodTrial, block_rows
from actors.results import CandidateResult, PhaseSeconds, TrialResult
from configs.load import validate
from configs.method import MethodConfig
from configs.pool import PoolConfig
from decoding.types import Request
from pipeline.pilot.verdict import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    NONE,
    PilotVerdict,
    Range,
    judge,
    mean_of,
    needed_rows,
    pilot_method,
    pilot_pool,
)
from tests.actors.costs import ENCODE_S, Makers, Workload, admit_s

CHAIN = {"plain": 0, "chain-5": 5}
LOSSLESS = {"plain": True, "chain-5": True}


@pytest.fixture(autouse=True, scope="module")
def no_collection() -> Iterator[None]:
    """Skips garbage collection, which takes a second in a test process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.serving.recovery.release_memory", lambda: None)
        patch.setattr("actors.auto.trial.release_memory", lambda: None)
        yield


def tried(workload: Workload, methods: dict[str, int] = CHAIN, seed: int = 0) -> TrialResult:
    """The result of a pilot's trial."""
    makers = Makers(lambda _: workload, seed)
    trial = MethodTrial(makers.candidates(methods), workload.batch, 6, 0, makers.clock, MIN_ROUNDS)
    for index in range(100_000):
        if trial.choices:
            return trial.choices[0]
        while trial.num_waiting < 40:
            trial.submit(Request(f"s{index}-{trial.num_waiting}", "x"))
        trial.step()
    raise AssertionError("the trial comes to no end")


def judged(workload: Workload, methods: dict[str, int] = CHAIN, seed: int = 0) -> PilotVerdict:
    verdict = judge(tried(workload, methods, seed), dict.fromkeys(methods, True), "vision tower", 0.01, 0.0)
    assert verdict is not None
    return verdict


SLOW_DRAFTER = Workload(8, 40, 0.4, 0.2, noise=0.05)
GOOD_DRAFTER = Workload(4, 40, 0.02, 0.8, noise=0.05)
SHORT = Workload(8, 2, 0.02, 0.8, noise=0.02)
"""Of the engine's time per row, decoding takes about a fifth."""


@pytest.mark.parametrize(("workload", "recommended"), [(SLOW_DRAFTER, NONE), (GOOD_DRAFTER, "chain-5"), (SHORT, NONE)])
def test_phases_ceiling_and_recommendation_are_those_of_the_costs(workload: Workload, recommended: str) -> None:
    verdict = judged(workload)
    plain_s, admitted_s = workload.sample_s(0), admit_s(0)
    assert verdict.encode_s.value == pytest.approx(ENCODE_S, rel=0.05)
    assert verdict.prefill_s.value == pytest.approx(admitted_s - ENCODE_S, rel=0.1)
    assert verdict.decode_s.value == pytest.approx(plain_s - admitted_s, rel=0.1)
    assert verdict.ceiling.value == pytest.approx(plain_s / admitted_s, rel=0.12)
    assert verdict.ceiling.low <= plain_s / admitted_s * 1.02
    assert verdict.ceiling.high >= plain_s / admitted_s * 0.98
    plain, chain = verdict.methods
    assert (plain.speedup, plain.method) == (Range(1.0, 1.0, 1.0), "plain")
    assert chain.speedup is not None
    true = plain_s / workload.sample_s(5)
    assert chain.speedup.value == pytest.approx(true, rel=0.12)
    assert chain.speedup.value <= verdict.ceiling.high
    assert verdict.recommended == recommended
    assert (verdict.fastest == "chain-5") == (true > 1)


def test_the_interval_of_a_speed_up_holds_the_true_one_in_most_pilots() -> None:
    workload = Workload(8, 24, 0.1, 0.6, noise=0.1)
    true, held = workload.sample_s(0) / workload.sample_s(5), 0
    for seed in range(20):
        speedup = judged(workload, seed=seed).methods[1].speedup
        assert speedup is not None
        held += speedup.low <= true <= speedup.high
    assert held >= 17


def test_a_slower_method_is_measured_in_every_round_of_a_pilot() -> None:
    hopeless = Workload(4, 40, 0.9, 0.05)
    pilot = tried(hopeless)
    assert pilot.num_rounds == MIN_ROUNDS
    assert {candidate.method: candidate.num_rows >= 3 * block_rows(4) for candidate in pilot.standings} == {
        "plain": True,
        "chain-5": True,
    }
    assert len(pilot.plain) == MIN_ROUNDS - 1


def test_plain_decoding_alone_has_phases_and_a_ceiling_with_intervals() -> None:
    verdict = judged(GOOD_DRAFTER, {"plain": 0})
    assert verdict.recommended == NONE
    assert "no method with a drafter was measured" in verdict.reason
    assert math.isfinite(verdict.ceiling.high)
    assert verdict.methods[0].row_s is not None
    assert math.isfinite(verdict.methods[0].row_s.high)
    assert verdict.methods[0].row_s.value == pytest.approx(GOOD_DRAFTER.sample_s(0), rel=0.1)


def choice_of(low: float | None, high: float | None, speedup: float | None = 1.5) -> TrialResult:
    plain = CandidateResult("plain", 0.2, 0.19, 0.21, 1.0, 48, "slower", 1.0, 1.0, 1.0)
    chain = CandidateResult("chain-5", 0.13, 0.12, 0.14, 3.0, 48, "chosen", speedup, low, high)
    times = tuple(PhaseSeconds(0.02, 0.03, 0.15 + 0.01 * turn) for turn in range(3))
    return TrialResult("chain-5", "first rows", 96, 4, 10.0, (chain, plain), times)


def recommended(choice: TrialResult, methods: dict[str, bool] = LOSSLESS) -> tuple[str, str]:
    verdict = judge(choice, methods, "vision tower")
    assert verdict is not None
    return verdict.recommended, verdict.reason


def test_a_method_is_recommended_only_if_its_interval_is_above_plain_decoding() -> None:
    assert recommended(choice_of(1.01, 2.2)) == ("chain-5", "chain-5 reaches 1.50x (1.01 to 2.20) of plain")
    name, reason = recommended(choice_of(0.99, 2.2))
    assert (name, "no method is measurably faster than plain" in reason) == (NONE, True)
    name, reason = recommended(choice_of(0.7, 0.95, 0.8))
    assert (name, "every method is slower than plain" in reason) == (NONE, True)
    assert recommended(choice_of(None, None))[0] == NONE  # one round has no interval
    assert recommended(choice_of(None, None, None))[0] == NONE


def test_a_lossy_method_is_marked() -> None:
    lossy = {"plain": True, "chain-5": False}
    name, reason = recommended(choice_of(1.2, 1.8), lossy)
    assert (name, "changes texts" in reason) == ("chain-5", True)
    verdict = judge(choice_of(1.2, 1.8), lossy, "vision tower")
    assert verdict is not None
    assert [line for line in verdict.lines() if line.startswith("  chain-5") and "lossy" in line]


def test_without_plain_decoding_there_is_no_verdict() -> None:
    assert judge(replace(choice_of(1.1, 1.3), plain=()), LOSSLESS, "vision tower") is None


def test_hours_and_costs_scale_with_rows_and_add_uncertainties() -> None:
    verdict = judge(choice_of(1.2, 1.8), LOSSLESS, "vision tower", 0.25, 0.3)
    assert verdict is not None
    priced = verdict.with_hours(36_000, Range(1.0, 0.9, 1.1), 2.0, 3.0)
    plain, chain = priced.methods
    assert plain.device_hours is not None
    assert plain.device_hours.value == pytest.approx(4.0)
    assert plain.device_hours.low == pytest.approx(4.0 * (1 - math.hypot(0.05, 0.1)))
    assert chain.cost is not None
    assert chain.cost.value == pytest.approx(0.13 * 36_000 * 2 / 3600 * 3)
    text = "\n".join(priced.lines())
    for words in ("vision tower", "250 ms of a core", "waited for input in 30%", "ceiling", "cost 12", "recommended"):
        assert words in text
    again = json.loads(json.dumps(priced.to_json(), allow_nan=False))
    assert again["recommended"] == "chain-5"


def test_unbounded_numbers_are_null_in_json() -> None:
    only_decoding = replace(choice_of(None, None), plain=(PhaseSeconds(0.0, 0.0, 0.1),))
    verdict = judge(only_decoding, LOSSLESS, "vision tower")
    assert verdict is not None
    values = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert values["ceiling"]["value"] is None
    assert "unbounded" in "\n".join(verdict.lines())


def test_means_have_students_interval() -> None:
    mean = mean_of([1.0, 2.0, 3.0])
    assert mean.value == 2.0
    assert mean.high - 2.0 == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert math.isinf(mean_of([1.0]).high)


# --- the trial of a pilot --------------------------------------------------------------------------------------------


def method_of(**values: object) -> MethodConfig:
    return validate(MethodConfig, values, "test")


def test_a_pilot_tries_plain_decoding_beside_the_configured_method() -> None:
    method = method_of(drafter={"kind": "lookup"}, name="own")
    assert [each.label for each in pilot_method(method).methods] == ["plain", "own"]
    assert [each.label for each in pilot_method(method_of()).methods] == ["plain"]
    several = method_of(auto={"candidates": [{"drafter": {"kind": "lookup"}}, {"drafter": {"kind": "jacobi"}}]})
    assert len(pilot_method(several).methods) == 3
    lossy = method_of(drafter={"kind": "model"}, acceptance={"kind": "typical"})
    assert [each.verify_mode for each in pilot_method(lossy).methods] == ["lossless", "lossy"]


@pytest.mark.parametrize(("num_rows", "rounds"), [(0, MIN_ROUNDS), (256, MIN_ROUNDS), (640, 5), (10**6, MAX_ROUNDS)])
def test_larger_pilots_have_more_rounds(num_rows: int, rounds: int) -> None:
    auto = pilot_method(method_of(drafter={"kind": "lookup"}), 8, num_rows).auto
    assert auto is not None
    assert (auto.min_rounds, auto.max_rounds, auto.max_rechecks) == (MIN_ROUNDS, rounds, 0)
    longest = rounds * 2 * MAX_LONGER * block_rows(8)
    assert longest <= max(num_rows, MIN_ROUNDS * 2 * MAX_LONGER * block_rows(8)), "the pilot ends before its trial"


def test_the_rows_that_a_pilot_needs_are_known_before() -> None:
    pool = PoolConfig(slots=16, max_size=4, min_size=2)
    assert needed_rows(method_of(drafter={"kind": "lookup"}), pool) == MIN_ROUNDS * 2 * 32
    assert needed_rows(method_of(), PoolConfig(slots="auto")) is None
    assert pilot_pool(pool, 3).model_dump() == pool.model_dump() | {"min_size": 1, "max_size": 1, "torch_threads": 3}
