"""Step times on a machine of varying speed: a measurement of one kind of step updates the others."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.controllers.pace_filter import MAX_LEAP, NOISE, OWN_WALK, PACE_WALK, StepTimeFilter


def seen(*steps: tuple[str, float], paces: StepTimeFilter | None = None) -> StepTimeFilter:
    filtered = paces or StepTimeFilter()
    for kind, seconds in steps:
        filtered.add(kind, math.log(seconds))
    return filtered


def seconds(paces: StepTimeFilter, kind: str) -> float:
    return math.exp(paces.log_seconds(kind))


def smoothed(steps: list[tuple[int, float]]) -> list[float]:
    """Each kind's time after the last step, from all normal equations at once and without a filter."""
    kinds = sorted({kind for kind, _ in steps})
    num, length = len(kinds), len(steps)
    rows: list[np.ndarray] = []
    wanted: list[float] = []
    # The unknowns: every kind's own deviation after each step, and what all share.
    size = length * (num + 1)

    def row(entries: dict[int, float], value: float, deviation: float) -> None:
        line = np.zeros(size)
        for position, factor in entries.items():
            line[position] = factor / deviation
        rows.append(line)
        wanted.append(value / deviation)

    row({num: 1.0}, 0.0, 1e-9)
    for t, (kind, value) in enumerate(steps):
        here = t * (num + 1)
        row({here + kinds.index(kind): 1.0, here + num: 1.0}, value, NOISE)
        if t + 1 < length:
            for index in range(num):
                row({here + index: -1.0, here + num + 1 + index: 1.0}, 0.0, OWN_WALK)
            row({here + num: -1.0, here + num + 1 + num: 1.0}, 0.0, PACE_WALK)
    solution = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]
    last = (length - 1) * (num + 1)
    return [float(solution[last + index] + solution[last + num]) for index in range(num)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-0.05, 0.05)), min_size=1, max_size=25))
def test_the_filter_equals_the_least_squares_solution_over_all_steps(drawn: list[tuple[int, float]]) -> None:
    """None of these steps is an outlier."""
    steps = [(kind, 0.3 * kind + noise) for kind, noise in drawn]
    paces = StepTimeFilter()
    for kind, value in steps:
        assert not paces.add(kind, value)
    estimates = [paces.log_seconds(kind) for kind in sorted({kind for kind, _ in steps})]
    assert estimates == pytest.approx(smoothed(steps), abs=1e-4)


def test_estimates_of_kinds_that_are_not_run_follow_the_pace_of_the_machine() -> None:
    paces = seen(*[("plain", 1.0), ("drafts", 3.0)] * 5)
    seen(*[("plain", 1.4)] * 12, paces=paces)
    assert seconds(paces, "plain") == pytest.approx(1.4, rel=0.02)
    assert seconds(paces, "drafts") == pytest.approx(4.2, rel=0.05)
    seen(*[("plain", 1.0)] * 12, paces=paces)
    assert seconds(paces, "drafts") == pytest.approx(3.0, rel=0.05)


def test_one_delayed_step_has_little_weight_and_two_in_a_row_have_more() -> None:
    paces = seen(*[("plain", 1.0), ("drafts", 3.0)] * 5)
    seen(("plain", 20.0), paces=paces)
    assert seconds(paces, "plain") < 1.2
    seen(("plain", 1.0), ("plain", 1.0), paces=paces)
    assert paces.is_current("drafts")
    seen(("plain", 1.5), ("plain", 1.5), paces=paces)
    assert seconds(paces, "plain") == pytest.approx(1.5, rel=0.1)
    assert paces.is_current("plain")
    assert not paces.is_current("drafts"), "it was not seen since"
    assert paces.is_current("half"), "it never was"
    seen(("drafts", 4.5), paces=paces)
    assert paces.is_current("drafts")


def test_a_change_larger_than_a_change_of_pace_changes_only_its_own_kind() -> None:
    paces = seen(*[("plain", 1.0), ("drafts", 3.0)] * 5)
    far = 3.0 * math.exp(1.5 * MAX_LEAP)
    assert not paces.add("drafts", math.log(far))
    assert paces.add("drafts", math.log(far))
    assert seconds(paces, "drafts") == pytest.approx(far, rel=0.1)
    assert seconds(paces, "plain") == pytest.approx(1.0, rel=0.25)


def test_a_delayed_first_step_of_a_kind_is_corrected_by_the_next_one() -> None:
    paces = seen(*[("plain", 1.0)] * 5, ("drafts", 30.0), ("drafts", 2.0))
    assert seconds(paces, "drafts") == pytest.approx(2.0, rel=0.02)
    assert seconds(paces, "plain") == pytest.approx(1.0, rel=0.05)


def test_forgetting_one_kind_does_not_change_the_others() -> None:
    paces = seen(*[("plain", 1.0), ("half", 2.0), ("drafts", 3.0)] * 12)
    before = seconds(paces, "drafts")
    paces.forget("half")
    assert (paces.count("plain"), paces.count("half"), paces.count("drafts")) == (12, 0, 12)
    assert seconds(paces, "drafts") == before
    assert paces.is_current("half"), "nothing is known of it that could have changed"
    seen(*[("plain", 1.3)] * 10, paces=paces)
    assert seconds(paces, "drafts") == pytest.approx(3.9, rel=0.06)
    seen(("half", 2.6), paces=paces)
    assert seconds(paces, "half") == pytest.approx(2.6, rel=0.02)


def test_the_filter_stays_accurate_over_ten_thousand_steps() -> None:
    """Relations between kinds stay known, whatever the machine did in ten thousand steps."""
    paces, chance, pace = StepTimeFilter(), random.Random(0), 0.0
    for number in range(10_000):
        leap = chance.choice((-0.4, 0.4)) if chance.random() < 0.01 else 0.0
        pace = max(-1.5, min(1.5, pace + leap + chance.gauss(0.0, 0.01)))
        kind = number % 20 if number < 200 or number % 50 < 20 else 3
        paces.add(kind, 0.1 * kind + pace + chance.gauss(0.0, 0.03))
    errors = [paces.log_seconds(kind) - 0.1 * kind - pace for kind in range(20)]
    assert max(map(abs, errors)) < 0.1
    assert np.linalg.eigvalsh(paces._covariance).min() > 0.0
