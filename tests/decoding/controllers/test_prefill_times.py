"""What reading prompts is taken to cost, from readings of which one had to wait for something."""

from __future__ import annotations

import math

import pytest

from decoding.controllers.base import Reading
from decoding.controllers.prefill_times import MEMORY_READINGS, PromptCosts


def test_nothing_is_known_without_a_reading() -> None:
    costs = PromptCosts()
    costs.add(Reading(), 5, [])
    assert costs.read_s(100) == costs.seconds_per_token == 0.0
    assert costs.num_left(4) == math.inf


def test_readings_count_per_token_of_a_prompt_and_per_token_made() -> None:
    costs = PromptCosts()
    costs.add(Reading(200, 0.4), 10, [])
    assert costs.read_s(50) == pytest.approx(0.1)
    assert costs.seconds_per_token == 0.0, "no sample has ended"
    # 40 tokens made, and two prompts of 100 ended, each of which is followed by another.
    costs.add(Reading(100, 0.2), 30, [100, 100])
    keep = (1.0 - 1.0 / 256.0) ** 2
    assert costs.seconds_per_token == pytest.approx(0.002 * 200 / (10 * keep + 30))


@pytest.mark.parametrize("place", range(MEMORY_READINGS))
def test_a_reading_that_waited_for_a_compiler_does_not_make_the_others_dear(place: int) -> None:
    costs = PromptCosts()
    for number in range(MEMORY_READINGS):
        costs.add(Reading(100, 8.0 if number == place else 0.1), 10, [100])
    assert costs.read_s(100) == pytest.approx(0.1)


def test_of_two_readings_the_quicker_one_is_believed_and_dearer_prompts_are_once_they_are_the_rule() -> None:
    costs = PromptCosts()
    costs.add(Reading(100, 8.0), 10, [100])
    assert costs.read_s(100) == pytest.approx(8.0)
    costs.add(Reading(100, 0.1), 10, [100])
    assert costs.read_s(100) == pytest.approx(0.1)
    for _ in range(MEMORY_READINGS // 2 + 1):
        costs.add(Reading(100, 0.5), 10, [100])
    assert costs.read_s(100) == pytest.approx(0.5)
