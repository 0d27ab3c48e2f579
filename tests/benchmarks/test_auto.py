"""Tests the numbers of the benchmark of `method.auto`, and that it refuses differing tokens; no model runs here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.auto.comparison import Block, Comparison
from benchmarks import auto
from benchmarks.auto import Alone, Tokens, auto_claims_table, auto_table, check_equal, claims


def cell(best: str, gap: float, chosen: str, verdict: str) -> dict[str, Any]:
    return {
        **{"batch": 2, "length": 6, "drafter": "poor", "ratio": 0.2, "measured_ratio": 0.213, "best": best, "gap": gap},
        **{"acceptance_lengths": {"plain": 1.0, "chain-2": 1.46}, "chosen": chosen, "chosen_slowdown": 1 + gap},
        **{"verdict": verdict, "trial": {"num_rows": 96, "num_rounds": 2}},
    }


def test_the_table_has_a_row_for_every_workload() -> None:
    cells = [cell("plain", 0.08, "chain-2", "within the interval"), cell("chain-2", 0.31, "chain-2", "the best")]
    results = auto.results_of(cells)
    assert (results["num_best"], results["num_within"], results["num_won_by_plain"]) == (1, 1, 1)
    assert (results["num_workloads"], results["num_planned"], results["num_gaps_of_5_to_15_percent"]) == (2, 16, 1)
    lines = auto_table(results).splitlines()
    assert lines[2] == (
        "| 2 | 6 | poor | 0.2 | 0.21 | 1.46 | plain | 8 % | chain-2 | within the interval | 8 % | 96 rows, 2 rounds |"
    )
    assert {line.count("|") for line in lines} == {13}
    assert len(lines) == 4


def test_claims_follow_from_the_workloads_and_a_choice_that_is_another_or_a_workload_left_out_breaks_them() -> None:
    good = [cell("plain", 0.05, "plain", "the best")] * 3 + [
        cell("chain-2", 0.31, "chain-2", "within the interval")
    ] * 13
    assert [holds for _, holds, _ in claims(auto.results_of(good))] == [True, True, False, True, True]
    assert [holds for _, holds, _ in claims(auto.results_of(good[1:]))] == [False, True, False, False, False]
    near = [{**one, "chosen_slowdown": 1.04} for one in good]
    assert [holds for _, holds, _ in claims(auto.results_of(near))] == [True] * 5
    for verdict in ("another", "within the trial's interval"):
        bad = [*good[:-1], cell("chain-2", 0.31, "plain", verdict)]
        assert [holds for _, holds, _ in claims(auto.results_of(bad))] == [True, False, False, True, True]
    table = auto_claims_table(auto.results_of(bad))
    assert "| the best in 3, within the interval in 12, only within the trial's in 1, another in 0 | **no** |" in table
    assert "| at most 31.0 % slower | **no** |" in table
    assert [holds for _, holds, _ in claims(auto.results_of([]))] == [False] * 5


@pytest.mark.parametrize(
    ("chosen", "noted", "verdict"),
    [("a", "chosen", "the best"), ("b", "slower", "another"), ("b", auto.WITHIN, "within the trial's interval")],
)
def test_a_choice_is_judged_by_what_the_methods_took_alone(chosen: str, noted: str, verdict: str) -> None:
    times = {"a": [1.0, 1.0, 1.0], "b": [1.5, 1.5, 1.5]}
    clear = Comparison(
        [Block(name, at, s, 0.0, 1.0, 16) for name, all_s in times.items() for at, s in enumerate(all_s)], 0
    )
    assert auto.verdict(clear, chosen, noted) == verdict
    times["b"] = [0.9, 1.2, 1.2]
    close = Comparison(
        [Block(name, at, s, 0.0, 1.0, 16) for name, all_s in times.items() for at, s in enumerate(all_s)], 0
    )
    assert auto.verdict(close, "b", "slower") == "within the interval"


def test_tokens_that_differ_end_the_benchmark() -> None:
    known: Tokens = {}
    check_equal(known, {"row-0": (1, 2), "row-1": (3,)}, "plain")
    check_equal(known, {"row-1": (3,)}, "chain-2")
    with pytest.raises(RuntimeError, match="row-0: chain-5 gives other tokens"):
        check_equal(known, {"row-0": (1, 3)}, "chain-5")
    with pytest.raises(RuntimeError, match="row-2: chain-5 gives other tokens than the method before it, or none"):
        check_equal(known, {"row-2": ()}, "chain-5")


class FakeEngine:
    def __init__(self, name: str, turns: list[str]) -> None:
        self.name, self.turns = name, turns

    def run(self, rows: Any) -> Any:
        self.turns.append(self.name)
        for row in rows:
            telemetry = SimpleNamespace(num_spec_steps=2, num_accepted_draft_tokens=3)
            yield SimpleNamespace(sample_id=row.sample_id, token_ids=(1, 2), telemetry=telemetry)


def test_methods_take_turns_before_and_after_a_trial_and_the_first_turn_counts_for_nothing() -> None:
    turns: list[str] = []
    names = ("plain", "chain-2", "chain-5")
    pair: Any = SimpleNamespace(
        config=SimpleNamespace(method=SimpleNamespace(methods=[SimpleNamespace(label=name) for name in names])),
        engine=lambda slots, one: FakeEngine(one.label, turns),
    )
    alone = Alone(pair, 4, 6)
    assert (tuple(turns), alone._blocks) == (names, [])
    for _ in range(2):
        alone.measure(2)
    assert turns == [*names, *reversed(names), *names, *reversed(names), *names]
    assert [block.candidate for block in alone._blocks] == turns[3:]
    assert {block.round for block in alone._blocks} == {2, 3, 4, 5}
    assert set(alone.comparison.names) == set(names)
    assert alone.lengths == dict.fromkeys(names, 2.5)
    assert len(alone.tokens) == 24 == alone._blocks[0].num_rows


def test_a_machine_that_changes_meanwhile_widens_the_interval() -> None:
    def measured(after: float) -> Comparison:
        times = {"plain": [1.0, 1.01, after, after], "chain-2": [1.1, 1.1, 1.1, 1.1]}
        return Comparison(
            [Block(name, at, s, 0, 1, 16) for name, all_s in times.items() for at, s in enumerate(all_s)], 0
        )

    assert measured(1.0).is_slower("chain-2")
    assert not measured(1.17).is_slower("chain-2")
