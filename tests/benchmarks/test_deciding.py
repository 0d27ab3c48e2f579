"""Tests the rule that decides claims, at its limits, and that every claim of the benchmarks follows it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.harness.claims import (
    MIN_SAMPLES,
    SURE,
    Holds,
    all_of,
    any_of,
    claims_table,
    decide,
    enough,
    ratio_error,
    steps_error,
)
from benchmarks.lantern import __main__ as lantern
from benchmarks.lantern import claims as lantern_claims
from benchmarks.methods import __main__ as methods
from benchmarks.methods.claims import check_claims


@pytest.mark.parametrize(
    ("gap", "num", "expected"),
    [
        (SURE * 0.1 + 1e-9, MIN_SAMPLES, True),
        (SURE * 0.1, MIN_SAMPLES, None),  # the interval ends at zero
        (-SURE * 0.1, MIN_SAMPLES, None),
        (-SURE * 0.1 - 1e-9, MIN_SAMPLES, False),
        (1.0, MIN_SAMPLES - 1, None),  # one sample too few
        (-1.0, MIN_SAMPLES - 1, None),
    ],
)
def test_a_gap_is_decided_by_its_interval_and_only_with_enough_samples(gap: float, num: int, expected: Holds) -> None:
    assert decide(gap, 0.1, num) is expected


def test_without_an_error_the_sign_decides_and_nothing_does_not() -> None:
    assert [decide(gap, 0.0, MIN_SAMPLES) for gap in (0.1, -0.1, 0.0)] == [True, False, None]


def test_a_fact_can_be_rejected_with_any_number_of_samples_and_is_accepted_with_enough() -> None:
    assert [enough(True, num) for num in (MIN_SAMPLES, MIN_SAMPLES - 1)] == [True, None]
    assert [enough(False, num) for num in (MIN_SAMPLES, 1)] == [False, False]


def test_parts_decide_the_whole() -> None:
    assert [all_of(p) for p in ([True, True], [True, None], [None, False], [])] == [True, None, False, None]
    assert [any_of(p) for p in ([None, True], [False, None], [False, False], [])] == [True, None, False, None]


def test_the_error_of_a_ratio() -> None:
    # Ratios 1, 1, 0, 0 of equal weight: √(4 · 0.5²) / 4.
    assert ratio_error([1, 1, 0, 0], [1, 1, 1, 1]) == pytest.approx(0.25)
    assert ratio_error([3, 6], [1, 2]) == 0.0
    assert ratio_error([0], [0]) == 0.0


def test_the_error_over_steps() -> None:
    # Half of four steps took nothing, half took two: a deviation of 1, over √4.
    assert steps_error([2, 0, 2]) == pytest.approx(0.5)
    assert steps_error([]) == 0.0


def test_the_table_has_three_words() -> None:
    claims = [{"claim": "a", "holds": holds, "numbers": "1"} for holds in (True, False, None)]
    table = claims_table({"claims": claims})
    assert [line.split(" | ")[1] for line in table.splitlines()[2:]] == ["yes", "**no**", "not decided"]


def thin_out(data: Any, key: str) -> Any:
    """The same results as of one sample too few."""
    if isinstance(data, dict):
        return {name: MIN_SAMPLES - 1 if name == key else thin_out(value, key) for name, value in data.items()}
    return [thin_out(one, key) for one in data] if isinstance(data, list) else data


def test_with_too_few_samples_no_claim_is_decided() -> None:
    committed = json.loads(methods.RESULTS.read_text())
    assert {True, False} <= {claim["holds"] for claim in check_claims(committed)}
    assert {claim["holds"] for claim in check_claims(thin_out(committed, "num_cases"))} == {None}
    kinds = json.loads(lantern.RESULTS.read_text())["kinds"]
    assert {True, False} <= {claim["holds"] for claim in lantern_claims.check_claims(kinds)}
    assert {claim["holds"] for claim in lantern_claims.check_claims(thin_out(kinds, "num_images"))} == {None}


def test_a_wide_interval_leaves_a_claim_open() -> None:
    committed = json.loads(methods.RESULTS.read_text())
    before = {claim["claim"]: claim["holds"] for claim in check_claims(committed)}
    (name,) = [text for text in before if text.startswith("LVSpec accepts at least 1.5 times")]
    assert before[name] is True
    for cell in committed["methods"]["lvspec"]["scenarios"].values():
        cell["acceptance_length_se"] = 100.0
    assert {claim["claim"]: claim["holds"] for claim in check_claims(committed)}[name] is None
