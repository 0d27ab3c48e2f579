"""Estimated prefill times, from measurements with one delayed outlier."""

from __future__ import annotations

import math

import pytest

from decoding.controllers.base import PrefillTime
from decoding.controllers.step_times import MAX_SAMPLES, PrefillTimeModel


def test_without_a_measurement_prefills_are_taken_as_free() -> None:
    costs = PrefillTimeModel()
    costs.add(PrefillTime(), 5, [])
    assert costs.prefill_s_of(100) == costs.seconds_per_token == 0.0
    assert costs.remaining_tokens(4) == math.inf


def test_prefill_times_are_counted_per_prompt_token_and_per_generated_token() -> None:
    costs = PrefillTimeModel()
    costs.add(PrefillTime(200, 0.4), 10, [])
    assert costs.prefill_s_of(50) == pytest.approx(0.1)
    assert costs.seconds_per_token == 0.0, "no sample has ended"
    # 40 tokens made, and two prompts of 100 ended, each of which is followed by another.
    costs.add(PrefillTime(100, 0.2), 30, [100, 100])
    keep = (1.0 - 1.0 / 256.0) ** 2
    assert costs.seconds_per_token == pytest.approx(0.002 * 200 / (10 * keep + 30))


@pytest.mark.parametrize("index", range(MAX_SAMPLES))
def test_a_prefill_that_waited_for_a_compiler_does_not_raise_the_estimate(index: int) -> None:
    costs = PrefillTimeModel()
    for number in range(MAX_SAMPLES):
        costs.add(PrefillTime(100, 8.0 if number == index else 0.1), 10, [100])
    assert costs.prefill_s_of(100) == pytest.approx(0.1)


def test_the_faster_of_two_prefill_times_is_used_until_slower_ones_are_the_majority() -> None:
    costs = PrefillTimeModel()
    costs.add(PrefillTime(100, 8.0), 10, [100])
    assert costs.prefill_s_of(100) == pytest.approx(8.0)
    costs.add(PrefillTime(100, 0.1), 10, [100])
    assert costs.prefill_s_of(100) == pytest.approx(0.1)
    for _ in range(MAX_SAMPLES // 2 + 1):
        costs.add(PrefillTime(100, 0.5), 10, [100])
    assert costs.prefill_s_of(100) == pytest.approx(0.5)
