"""Drops of acceptance are found after few windows, and even sources give no alarm."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.pool import AcceptanceDropConfig
from pipeline.reports.drift import (
    ALL,
    MAX_GROUPS,
    OTHERS,
    QUANTILE,
    ROOT,
    Change,
    DriftWatch,
    Moments,
    moments,
    prefix_of,
)
from pipeline.rows.schemas import result_schema
from tests.pipeline.reports.synthetic_job import live_job, result_row, tables

BOUND = AcceptanceDropConfig(max_drop=0.25, min_rows=200)


def rows_of(steps: list[int], accepted: list[int]) -> Moments:
    s, a = np.array(steps, float), np.array(accepted, float)
    return Moments(len(s), float(s.sum()), float(a.sum()), float(s @ s), float(a @ a), float(s @ a))


def drawn(rng: np.random.Generator, num_rows: int, chance: float) -> Moments:
    """Rows of 10 to 40 steps whose drafts are accepted with a chance that differs between rows."""
    steps = rng.integers(10, 41, num_rows)
    chances = np.clip(rng.normal(chance, 0.1, num_rows), 0.01, 0.99)
    accepted = [rng.binomial(4 * step, chance) for step, chance in zip(steps, chances)]
    return rows_of(steps.tolist(), accepted)


def test_moments_are_sums_over_rows_with_drafts_by_method_and_folder() -> None:
    rng = random.Random(0)
    rows = [result_row(number, 0.5, rng, source) for number, source in enumerate(["a/x", "a/y/z", "w", "b/x"])]
    rows.append(result_row(4, 0.5, rng, "a/x", error="broken_image"))
    plain = result_row(5, 0.5, rng, "a/x")
    plain["telemetry"] = plain["telemetry"] | {"num_draft_tokens": 0}
    by_folder = {
        (method, prefix): moments_of_folder
        for method, prefix, moments_of_folder in moments(pa.Table.from_pylist([*rows, plain], result_schema()))
    }
    assert set(by_folder) == {("eagle+chain+exact", name) for name in ("a", "b", ROOT)}
    s, a = ([row["telemetry"][name] for row in rows[:2]] for name in ("num_spec_steps", "num_accepted_draft_tokens"))
    assert by_folder["eagle+chain+exact", "a"] == rows_of(s, a)


@pytest.mark.parametrize(("source", "prefix"), [("a/b/c", "a"), ("c.parquet", ROOT), ("/a/b", "a"), ("", ROOT)])
def test_the_prefix_is_the_first_folder(source: str, prefix: str) -> None:
    assert prefix_of(source) == prefix


def test_the_variance_of_a_ratio_is_that_of_many_drawn_samples() -> None:
    rng = np.random.default_rng(3)
    samples = [drawn(rng, 100, 0.5) for _ in range(2000)]
    spread = np.std([math.log(sample.length) for sample in samples])
    assert np.mean([math.sqrt(sample.log_variance) for sample in samples]) == pytest.approx(spread, rel=0.05)


def test_the_interval_holds_the_true_ratio_as_often_as_its_quantile_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reports.drift.QUANTILE", 1.96)
    rng = np.random.default_rng(4)
    truth = (1 + 4 * 0.35) / (1 + 4 * 0.5)
    changes = [Change.of(drawn(rng, 200, 0.35), drawn(rng, 200, 0.5)) for _ in range(1000)]
    share = np.mean([change.low <= truth <= change.high for change in changes])
    assert 0.93 <= share <= 0.97


def test_even_sources_give_no_alarm_in_many_jobs() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        watch = DriftWatch(AcceptanceDropConfig(max_drop=0.05, min_rows=50))
        assert [event for _ in range(40) for event in watch.add("m", "a", drawn(rng, 50, 0.5))] == []


def test_a_source_that_changes_in_the_middle_gives_one_drop_and_one_recovery() -> None:
    rng = np.random.default_rng(6)
    watch = DriftWatch(BOUND)
    events = []
    for batch in range(90):
        chance = 0.15 if 30 <= batch < 60 else 0.5
        events += [(batch, event) for event in watch.add("m", "b", drawn(rng, 50, chance)) if event.source == "b"]
        events += [(batch, event) for event in watch.add("m", "a", drawn(rng, 50, 0.5)) if event.source == "a"]
    (first, drop), (second, recovery) = events
    assert (drop.source, drop.dropped, recovery.source, recovery.dropped) == ("b", True, "b", False)
    assert 33 <= first <= 38
    assert 60 < second <= 68
    assert drop.change.ratio == pytest.approx(1.6 / 3, abs=0.05)
    assert drop.change.high < 0.75
    assert "b: acceptance length dropped to 1.58, 52% of 3.02 " in drop.text()


def test_a_drop_within_the_bound_is_no_event_and_one_beyond_it_is() -> None:
    def events(chance: float) -> list[bool]:
        rng, watch = np.random.default_rng(7), DriftWatch(BOUND)
        chances = [0.5] * 8 + [chance] * 40
        return [
            event.dropped
            for chance in chances
            for event in watch.add("m", "a", drawn(rng, 50, chance))
            if event.source == ALL
        ]

    assert events(0.5 * 0.75) == []  # a length of 2.5, 17 % below 3
    assert events(0.24) == [True]  # a length of 1.96, 35 % below


def test_methods_have_references_of_their_own() -> None:
    rng, watch = np.random.default_rng(8), DriftWatch(BOUND)
    for _ in range(20):
        assert watch.add("deep", "a", drawn(rng, 50, 0.6)) == []
        assert watch.add("shallow", "a", drawn(rng, 50, 0.2)) == []
    ratios = [row["last"]["ratio"] for row in watch.table()]
    assert len(ratios) == 4
    assert all(abs(ratio - 1) < 0.1 for ratio in ratios)


def test_without_a_bound_rows_are_counted_and_nothing_is_compared() -> None:
    rng, watch = np.random.default_rng(9), DriftWatch(None)
    for chance in (0.6, 0.1):
        for _ in range(20):
            assert watch.add("m", "a", drawn(rng, 50, chance)) == []
    assert [(row["source"], row["num_rows"], row["last"]) for row in watch.table()] == [
        (ALL, 2000, None),
        ("a", 2000, None),
    ]


def test_memory_is_bounded_for_any_number_of_folders() -> None:
    rng, watch = np.random.default_rng(10), DriftWatch(BOUND)
    for number in range(1000):
        watch.add("m", f"folder-{number}", drawn(rng, 2, 0.5))
    assert len(watch.groups) == MAX_GROUPS + 1
    assert watch.groups["m", OTHERS].total.num_rows == 2 * (1000 - MAX_GROUPS + 1)
    assert watch.groups["m", ALL].total.num_rows == 2000


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2000)), min_size=2, max_size=60), st.integers(1, 59))
def test_moments_add_up_and_are_never_negative(rows: list[tuple[int, int]], cut: int) -> None:
    cut = min(cut, len(rows) - 1)
    whole, left, right = (
        rows_of([row[0] for row in part], [row[1] for row in part]) for part in (rows, rows[:cut], rows[cut:])
    )
    assert left + right == whole
    assert whole.log_variance >= 0
    change = Change.of(left + right, whole)
    assert change.low <= change.ratio == 1 <= change.high
    assert change.low >= 1 / whole.length - 1e-12


def test_rows_with_one_value_have_no_spread_and_one_row_has_no_interval() -> None:
    even = rows_of([10] * 20, [20] * 20)
    assert Change.of(even, even).high == pytest.approx(1, abs=1e-6)
    alone = Change.of(rows_of([10], [5]), even)
    assert alone.high > 1e100
    assert alone.low == pytest.approx(1 / 3)
    assert QUANTILE > 3


def test_a_live_job_reports_the_folder_that_drops() -> None:
    live = live_job(tables(6000), BOUND)
    assert {(drift.source, drift.dropped) for drift in live.drifts} >= {("scans", True)}
    assert {drift.source for drift in live.drifts} <= {"scans", ALL}
    assert [drift.text() for drift in live.since(0)] == [drift.text() for drift in live.drifts]
    assert list(live.since(live.num_drifts)) == []
    times = [drift.num_rows for drift in live.drifts]
    assert all(left <= right for left, right in pairwise(times))
