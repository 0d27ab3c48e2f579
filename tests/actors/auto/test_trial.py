"""A trial of methods with a fake clock: the cheapest candidate is kept, and no row is lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.auto.comparison import Block, BlockRecorder, Step, TimeComparison, TrialRow, fit_steps
from actors.auto.trial import CHOSEN, SLOWER, WITHIN, MethodTrial
from actors.results import TrialResult
from actors.serving.engine_thread import EngineThread, Suspect
from decoding.types import Completion, Request
from tests.actors.costs import METHODS, CostEngine, Makers, Workload

pytestmark = pytest.mark.slow

ROUNDS, RECHECKS = 6, 3


@pytest.fixture(autouse=True, scope="module")
def no_collection() -> Iterator[None]:
    """Skips garbage collection, which takes a second in a test process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.serving.recovery.release_memory", lambda: None)
        patch.setattr("actors.auto.trial.release_memory", lambda: None)
        yield


def request(index: int, word: str = "fine") -> Request:
    return Request(f"s{index}", f"{index} {word}")


def run(trial: MethodTrial, requests: Iterator[Request], until: Callable[[], bool] = lambda: False) -> list[Completion]:
    """Step a trial with rows always waiting, until the rows end or `until` holds."""
    done: list[Completion] = []
    more = True
    for _ in range(200_000):
        while more and trial.num_waiting < 40:
            submitted = next(requests, None)
            more = submitted is not None
            if submitted is not None:
                trial.submit(submitted)
        if until():
            return done
        if not trial.has_work:
            assert not more
            return done
        done += trial.step()
    raise AssertionError("the trial comes to no end")


def rows(number: int, start: int = 0) -> Iterator[Request]:
    return (request(index) for index in range(start, start + number))


def tried(workload: Workload, seed: int = 0, methods: dict[str, int] = METHODS) -> TrialResult:
    makers = Makers(lambda _: workload, seed)
    trial = MethodTrial(makers.candidates(methods), workload.batch, ROUNDS, RECHECKS, makers.clock)
    run(trial, rows(10**6), lambda: bool(trial.choices))
    return trial.choices[0]


# --- choice --------------------------------------------------------------------------------------------------------

GRID = [
    Workload(batch, num_tokens, ratio, acceptance, noise=0.05)
    for batch in (1, 8, 16)
    for num_tokens in (12, 40)
    for ratio in (0.05, 0.2)
    for acceptance in (0.15, 0.5, 0.8)
]


def test_on_a_grid_of_workloads_the_cheapest_or_an_indistinguishable_method_is_kept() -> None:
    won, gaps = Counter[str](), []
    for seed, workload in enumerate(GRID):
        true_s = {name: workload.sample_s(drafts) for name, drafts in METHODS.items()}
        best, second = sorted(true_s, key=true_s.__getitem__)[:2]
        won[best] += 1
        gaps.append(true_s[second] / true_s[best] - 1)
        choice = tried(workload, seed)
        notes = {candidate.method: candidate.note for candidate in choice.standings}
        assert notes[choice.method] == CHOSEN
        if choice.method != best:
            assert notes[best] == WITHIN, (workload, choice)
            assert true_s[choice.method] / true_s[best] < 1.06, (workload, choice)
        if gaps[-1] > 0.1:
            assert choice.method == best, (workload, choice)
    assert won["plain"] >= 3
    assert len([gap for gap in gaps if 0.05 <= gap <= 0.15]) >= 3
    assert min(won.values()) >= 3
    assert set(won) == set(METHODS)


def test_the_interval_holds_the_true_time_of_a_sample() -> None:
    workload = Workload(8, 48, 0.2, 0.6, noise=0.1)
    held = 0
    for seed in range(12):
        for candidate in tried(workload, seed).standings:
            assert candidate.sample_s is not None
            assert candidate.low_s is not None
            assert candidate.high_s is not None
            assert candidate.sample_s == pytest.approx(workload.sample_s(METHODS[candidate.method]), rel=0.12)
            held += candidate.low_s <= workload.sample_s(METHODS[candidate.method]) <= candidate.high_s
    assert held >= 30  # of 36


def test_a_clear_winner_ends_the_trial_early_and_a_tie_is_tried_for_all_rounds() -> None:
    clear = tried(Workload(4, 48, 0.01, 0.95), methods={"plain": 0, "chain-5": 5})
    assert (clear.method, clear.num_rounds) == ("chain-5", 1)
    assert {candidate.note for candidate in clear.standings} == {CHOSEN, SLOWER}
    makers = Makers(lambda _: Workload(4, 48, 0.0, 0.0, noise=0.1), 3)
    same = {name: makers.candidates({name: 0})[name] for name in ("plain", "twin")}
    trial = MethodTrial(same, 4, ROUNDS, RECHECKS, makers.clock)
    run(trial, rows(10**6), lambda: bool(trial.choices))
    assert trial.choices[0].num_rounds == ROUNDS
    assert sorted(candidate.note for candidate in trial.choices[0].standings) == [CHOSEN, WITHIN]


def test_a_machine_that_slows_down_during_a_trial_favours_no_candidate() -> None:
    """A machine that becomes slower with time slows the later blocks of all candidates."""
    workload = Workload(4, 32, 0.2, 0.5)
    makers = Makers(lambda _: workload)

    def clock() -> float:
        return makers.clock() * (1 + 0.2 * makers.clock())

    trial = MethodTrial(makers.candidates({"plain": 0, "chain-2": 2}), 4, ROUNDS, RECHECKS, clock)
    run(trial, rows(10**6), lambda: bool(trial.choices))
    seconds = {candidate.method: candidate.sample_s or 0.0 for candidate in trial.choices[0].standings}
    assert seconds["plain"] / seconds["chain-2"] == pytest.approx(workload.sample_s(0) / workload.sample_s(2), rel=0.06)


# --- every row once, also after failures ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    slots=st.integers(1, 9),
    number=st.integers(0, 700),
    sick=st.sets(st.integers(0, 699), max_size=5),
    sick_method=st.sampled_from(["chain-2", "chain-5", "both", "nobody"]),
    max_rounds=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@example(slots=4, number=600, sick={3, 5, 40, 41, 42}, sick_method="both", max_rounds=3, seed=0)
@example(slots=1, number=200, sick={20, 21, 22, 23}, sick_method="chain-2", max_rounds=2, seed=0)
@example(slots=9, number=700, sick=set(), sick_method="nobody", max_rounds=4, seed=1)
def test_every_row_is_decoded_once_and_records_its_method(
    slots: int, number: int, sick: set[int], sick_method: str, max_rounds: int, seed: int
) -> None:
    ill = {f"s{index}" for index in sick} if sick_method != "nobody" else set()
    makers = Makers(
        lambda _: Workload(slots, 6, 0.2, 0.5, noise=0.1),
        seed,
        lambda name, row: row.sample_id in ill and sick_method in (name, "both"),
    )
    trial = MethodTrial(makers.candidates(), slots, max_rounds, RECHECKS, makers.clock)
    done = run(trial, rows(number))
    assert Counter(completion.sample_id for completion in done) == Counter(f"s{index}" for index in range(number))
    assert {completion.text for completion in done} == {request(index).prompt for index in range(number)}
    assert all(completion.method in METHODS for completion in done)
    assert (trial.num_waiting, trial.num_free_slots, trial.has_work) == (0, slots, False)
    degraded = {completion.sample_id for completion in done if completion.telemetry.degraded}
    assert degraded <= ill
    assert all(len(choice.standings) == 3 for choice in trial.choices)


def test_free_slots_exclude_those_of_waiting_rows() -> None:
    makers = Makers(lambda _: Workload(4, 30, 0.2, 0.5))
    trial = MethodTrial(makers.candidates(), 4, ROUNDS, RECHECKS, makers.clock)
    assert trial.num_free_slots == 4
    for submitted in rows(3):
        trial.submit(submitted)
    assert (trial.num_free_slots, trial.num_waiting) == (1, 3)
    trial.step()
    assert (trial.num_free_slots, trial.num_waiting, trial.has_work) == (1, 0, True)
    for submitted in rows(3, start=3):
        trial.submit(submitted)
    assert trial.num_free_slots == 0


def test_expected_rows_are_prefetched_by_the_engine_that_decodes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[list[str]] = []

    def expect(_: CostEngine, requests: Iterable[Request]) -> None:
        named.append([request.sample_id for request in requests])

    monkeypatch.setattr(CostEngine, "expect", expect)
    makers = Makers(lambda _: Workload(4, 30, 0.2, 0.5))
    trial = MethodTrial(makers.candidates(), 4, ROUNDS, RECHECKS, makers.clock)
    for submitted in rows(6):
        trial.submit(submitted)
    trial.queue.expect(list(rows(2, start=6)))
    trial.step()
    assert named == [["s4", "s5", "s6", "s7"]]
    for submitted in rows(40, start=6):
        trial.submit(submitted)
    while not trial._is_changing:
        trial.step()
    # Before a change of engines, the engine of the following rows is unknown.
    trial.step()
    assert trial.num_waiting
    assert named[-1] == []


def test_one_engine_exists_at_a_time_and_always_with_all_slots() -> None:
    alive: Counter[str] = Counter()
    makers = Makers(lambda _: Workload(6, 12, 0.2, 0.5, noise=0.1))

    class Counted(CostEngine):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            alive["now"] += 1
            alive["most"] = max(alive["most"], alive["now"])

        def __del__(self) -> None:
            alive["now"] -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.actors.costs.CostEngine", Counted)
        trial = MethodTrial(makers.candidates(), 6, ROUNDS, RECHECKS, makers.clock)
        run(trial, rows(600))
    assert trial.choices
    assert alive["most"] == 1
    assert {slots for _, slots in makers.made} == {6}
    assert len(makers.made) > 3


def test_a_candidate_whose_drafter_fails_is_dropped_but_one_bad_row_drops_none() -> None:
    workload = Workload(4, 24, 0.05, 0.8, noise=0.02)
    broken = Makers(lambda _: workload, fails_on=lambda name, row: name == "chain-5")
    trial = MethodTrial(broken.candidates(), 4, ROUNDS, RECHECKS, broken.clock)
    done = run(trial, rows(400))
    notes = {candidate.method: candidate.note for candidate in trial.choices[0].standings}
    assert trial.choices[0].method == "chain-2"
    assert notes["chain-5"] == "failed to draft for 2 rows"
    assert len(done) == 400
    assert sum(completion.telemetry.degraded for completion in done) == 2
    bad_row = Makers(lambda _: workload, fails_on=lambda name, row: row.sample_id == "s20")
    trial = MethodTrial(bad_row.candidates(), 4, ROUNDS, RECHECKS, bad_row.clock)
    done = run(trial, rows(400))
    assert trial.choices[0].method == "chain-5"
    assert [completion.sample_id for completion in done if completion.telemetry.degraded] == ["s20"]


def test_when_every_drafter_fails_plain_decoding_is_left() -> None:
    makers = Makers(lambda _: Workload(4, 24, 0.05, 0.8), fails_on=lambda name, row: True)
    trial = MethodTrial(makers.candidates(), 4, ROUNDS, RECHECKS, makers.clock)
    done = run(trial, rows(300))
    assert trial.choices[0].method == "plain"
    assert sorted(candidate.note for candidate in trial.choices[0].standings) == [
        CHOSEN,
        "failed to draft for 2 rows",
        "failed to draft for 2 rows",
    ]
    assert len(done) == 300


def test_a_candidate_without_memory_has_fewer_slots_or_none() -> None:
    makers = Makers(lambda _: Workload(8, 24, 0.05, 0.8))
    full = makers.engine
    asked: list[tuple[str, int]] = []

    def engine(name: str, drafts: int, slots: int) -> CostEngine:
        asked.append((name, slots))
        if slots > {"plain": 8, "chain-2": 3, "chain-5": 0, "without": 1}[name]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return full(name, drafts, slots)

    makers.engine = engine  # type: ignore[method-assign]
    trial = MethodTrial(makers.candidates(), 8, ROUNDS, RECHECKS, makers.clock)
    done = run(trial, rows(400))
    assert len({completion.sample_id for completion in done}) == len(done) == 400
    notes = {candidate.method: candidate.note for candidate in trial.choices[0].standings}
    assert notes["chain-5"] == "does not fit into the device's memory: CUDA out of memory"
    assert {name: slots for name, slots in makers.made if name != "without"} == {"plain": 8, "chain-2": 2}
    assert [slots for name, slots in asked if name == "chain-2"][:4] == [8, 4, 2, 2]  # kept between blocks
    assert trial.num_free_slots == (8 if trial.choices[0].method == "plain" else 2)


def test_errors_other_than_out_of_memory_and_drafter_errors_propagate() -> None:
    makers = Makers(lambda _: Workload(4, 24, 0.05, 0.8))
    trial = MethodTrial(makers.candidates(), 4, ROUNDS, RECHECKS, makers.clock)
    trial.submit(request(0))

    def fault(self: CostEngine) -> list[Completion]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CostEngine, "step", fault)
        with pytest.raises(RuntimeError, match="illegal memory"):
            trial.step()


def test_an_engine_thread_with_a_trial_completes_suspects_and_rows_that_run_alone() -> None:
    makers = Makers(lambda _: Workload(3, 9, 0.2, 0.5, noise=0.1))
    trial = MethodTrial(makers.candidates(), 3, 2, RECHECKS, makers.clock)
    marked: list[list[str]] = []
    thread = EngineThread(trial, mark=lambda keys: marked.append(list(keys)))
    suspects = {5: Suspect("k5", 1), 40: Suspect("k40", 2), 41: Suspect("k41", 1), 90: Suspect("k90", 2)}
    batches = [
        thread.decode([request(index) for index in range(start, start + 200)], suspects) for start in (0, 200, 400)
    ]
    sample_ids = [completion.sample_id for batch in batches for completion in batch.result(timeout=600)]
    assert sample_ids == [f"s{index}" for index in range(600)]
    assert thread.waits.choices == trial.choices != ()
    thread.close()
    assert marked[-1] == []


# --- further trials ------------------------------------------------------------------------------------------------


def drifting(before: Workload, after: Workload, from_row: int) -> Makers:
    return Makers(lambda row: before if int(row.sample_id[1:]) < from_row else after, seed=5)


def test_when_acceptance_drifts_the_candidates_are_tried_again_and_another_is_kept() -> None:
    good, bad = (Workload(4, 24, 0.2, alpha, noise=0.02) for alpha in (0.85, 0.1))
    makers = drifting(good, bad, 1500)
    trial = MethodTrial(makers.candidates(), 4, ROUNDS, RECHECKS, makers.clock)
    done = run(trial, rows(4000))
    assert len(done) == 4000
    assert [choice.method for choice in trial.choices][:2] == ["chain-5", "plain"]
    assert trial.choices[1].reason.startswith("acceptance length 1.")
    assert {completion.method for completion in done[-500:]} == {"plain"}


def test_rows_that_drain_before_another_trial_do_not_count_in_it() -> None:
    good, bad = (Workload(4, 24, 0.2, alpha, noise=0.02) for alpha in (0.85, 0.1))
    makers = drifting(good, bad, 600)
    trial = MethodTrial(makers.candidates(), 4, 2, RECHECKS, makers.clock)
    source = rows(10_000)
    run(trial, source, lambda: bool(trial.choices))
    run(trial, source, lambda: trial._block is not None)
    num_draining = trial.queue.num_started
    assert (trial._made, trial._turn, trial.num_free_slots) == ("chain-5", "plain", 0)
    assert num_draining > 0
    while trial.queue.num_started:
        assert trial._block is not None
        assert (trial._block.steps, trial._block.rows, trial._block.num_submitted) == ([], [], 0)
        assert {completion.method for completion in trial.step()} <= {"chain-5"}
    trial.step()
    assert trial._block is not None
    assert (trial._made, len(trial._block.steps), trial._block.num_submitted) == ("plain", 1, 4)


def test_stable_acceptance_starts_no_second_trial_and_rechecks_are_bounded() -> None:
    steady = Workload(4, 24, 0.05, 0.8, noise=0.05)
    makers = Makers(lambda _: steady, seed=2)
    trial = MethodTrial(makers.candidates(), 4, ROUNDS, RECHECKS, makers.clock)
    run(trial, rows(5000))
    assert [choice.reason for choice in trial.choices] == ["first rows"]
    for max_rechecks in (0, 2):
        wild = Makers(lambda row: Workload(4, 24, 0.05, 0.95 if int(row.sample_id[1:]) // 900 % 2 else 0.6), seed=2)
        trial = MethodTrial(wild.candidates(), 4, 2, max_rechecks, wild.clock)
        run(trial, rows(9000))
        assert len(trial.choices) == 1 + max_rechecks


def test_plain_decoding_is_rechecked_at_growing_intervals() -> None:
    hard, easy = (Workload(4, 12, 0.2, alpha, noise=0.02) for alpha in (0.1, 0.9))
    makers = drifting(hard, easy, 400)
    trial = MethodTrial(makers.candidates(), 4, 2, RECHECKS, makers.clock)
    done = run(trial, rows(4000))
    assert [choice.method for choice in trial.choices] == ["plain", "chain-5"]
    assert trial.choices[1].reason.endswith("rows were decoded without drafts")
    assert len(done) == 4000
    makers = Makers(lambda _: hard)
    trial = MethodTrial(makers.candidates(), 4, 2, 100, makers.clock)
    run(trial, rows(12_000))
    assert 2 <= len(trial.choices) <= 4


# --- measuring -----------------------------------------------------------------------------------------------------


def test_a_block_counts_steps_at_full_slots_and_rows_by_hand() -> None:
    block = BlockRecorder("chain", 0)
    block.steps = [Step(9.0, 4, 4), *([Step(1.0, 4, 0)] * 6), Step(1.5, 4, 1), Step(2.0, 4, 2), Step(0.3, 2, 0)]
    block.rows = [TrialRow(12, 4), TrialRow(8, 4), TrialRow(0, 0)]
    sums = block.block()
    assert sums is not None
    assert sums.admit_s == pytest.approx(0.5)
    assert sums.acceptance_length == 20 / 8
    assert sums.token_s == pytest.approx(1.0 / 4 / 2.5)
    assert sums.sample_s(10) == pytest.approx(0.5 + 10 * 0.1)


def test_a_block_of_rows_that_all_came_in_at_once_takes_their_prefill_from_the_first_step() -> None:
    block = BlockRecorder("plain", 0, steps=[Step(5.0, 4, 4), *([Step(1.0, 4, 0)] * 3)], rows=[TrialRow(3, 3)])
    sums = block.block()
    assert sums is not None
    assert (sums.admit_s, sums.token_s) == (pytest.approx(1.0), pytest.approx(0.25))
    assert BlockRecorder("plain", 0).block() is None
    only_errors = BlockRecorder("plain", 0, steps=[Step(1.0, 1, 1)])
    assert only_errors.block() is None


def test_where_drafts_depend_on_the_load_only_rows_among_many_count() -> None:
    rows = [TrialRow(12, 4, 8.0), TrialRow(9, 3, 7.5), TrialRow(20, 4, 3.0)]
    steps = [Step(1.0, 8, 8), Step(1.0, 8, 0)]
    lengths = {
        by_load: BlockRecorder("a", 0, by_load, rows=rows, steps=steps).acceptance_length for by_load in (True, False)
    }
    assert lengths == {True: 21 / 7, False: 41 / 11}


def test_steps_are_split_into_decoding_and_admitting_and_a_hiccup_counts_for_nothing() -> None:
    rng = random.Random(1)
    steps = [Step(1.0 + 0.25 * k + 0.001 * rng.random(), 8, k) for k in (0, 1, 0, 2, 0, 0, 1, 3) * 5]
    assert fit_steps(steps) == (pytest.approx(1.0, abs=0.002), pytest.approx(0.25, abs=0.002))
    steps[7] = Step(60.0, 8, 3)
    assert fit_steps(steps) == (pytest.approx(1.0, abs=0.01), pytest.approx(0.25, abs=0.01))
    # If every step admits two of eight rows, a row takes four steps: 1.5 s / 2 rows, for any split.
    step_s, admit_s = fit_steps([Step(1.5, 8, 2)] * 5)
    assert admit_s + 4 * step_s / 8 == pytest.approx(1.5 / 2)


def blocks(times: dict[str, list[float]]) -> list[Block]:
    return [Block(name, number, 0.0, s, 1.0, 16) for name, all_s in times.items() for number, s in enumerate(all_s)]


def test_the_interval_is_students_over_what_rounds_and_candidates_leave_unexplained() -> None:
    comparison = TimeComparison(blocks({"a": [1.0, 1.1], "b": [1.5, 1.5]}), 1.0)
    standing = comparison.standing("a")
    # Residuals of ±log(1.1) / 4 at one degree of freedom, a mean over two rounds.
    noise = 0.0953101798 / 2
    assert standing.sample_s == pytest.approx((1.0 * 1.1) ** 0.5)
    assert standing.low_s is not None
    assert standing.sample_s / standing.low_s == pytest.approx(2.718281828 ** (12.706 * noise / 2**0.5), rel=1e-6)
    one_round = TimeComparison(blocks({"a": [1.0], "b": [1.5]}), 1.0)
    assert one_round.standing("a").low_s is None
    assert not one_round.is_slower("b")
