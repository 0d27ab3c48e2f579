"""Tests the detector of repetitions at the end of a text against the rule itself, written a second time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.scheduling.loops import MAX_PERIOD, Loop, LoopDetector
from decoding.scheduling.slots import RequestState
from decoding.types import Request, Sampling

Cut = tuple[int, int, int]
"""Number of tokens up to the end of a text, the start of the loop in it, and its period."""


def expected(tokens: Sequence[int], min_repeats: int, min_tokens: int) -> Cut | None:
    """The rule by its definition, on slices: the first text that ends in enough repetitions."""
    for end in range(1, len(tokens) + 1):
        for period in range(1, min(64, end) + 1):
            start = end - period
            while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
                start -= 1
            length = end - start
            if length >= period * min_repeats and length >= min_tokens:
                return end, start, period
    return None


def found(tokens: Sequence[int], min_repeats: int, min_tokens: int) -> Cut | None:
    detector = LoopDetector(min_repeats, min_tokens)
    for end, token in enumerate(tokens, start=1):
        if (loop := detector.take(token)) is not None:
            return end, loop.start, loop.period
    return None


def distinct(count: int, rng: random.Random) -> list[int]:
    return rng.sample(range(100, 30_000), count)


@pytest.mark.parametrize("period", range(1, 65))
def test_a_planted_loop_is_found_at_its_first_full_repetition(period: int) -> None:
    rng = random.Random(period)
    head, loop = distinct(37, rng), [token + 40_000 for token in distinct(period, rng)]
    length = max(4 * period, 48)
    tokens = head + (loop * (1 + length // period))[: length + 5]
    assert found(tokens, 4, 48) == (37 + length, 37, period) == expected(tokens, 4, 48)


def test_a_loop_of_a_longer_period_ends_no_text() -> None:
    loop = distinct(MAX_PERIOD + 1, random.Random(0))
    assert found(loop * 20, 2, 2) is None


def test_a_thousand_texts_without_loops_are_not_cut() -> None:
    """Each text is random over few tokens, with planted repetitions that are one token short of the rule."""
    num_near = 0
    for seed in range(1000):
        rng = random.Random(seed)
        size = rng.choice([5, 20, 500])
        tokens: list[int] = []
        while len(tokens) < 200:
            period = rng.randint(1, 48)
            part = [rng.randrange(size) for _ in range(period)]
            tokens += (part * 4)[: max(4 * period, 48) - 1] if rng.random() < 0.3 else part
            num_near += 1
        tokens = _without_loops(tokens)
        assert expected(tokens, 4, 48) is None
        assert found(tokens, 4, 48) is None
    assert num_near > 2000


def _without_loops(tokens: list[int]) -> list[int]:
    """Break every loop by another token in place of its last one."""
    while (cut := expected(tokens, 4, 48)) is not None:
        tokens[cut[0] - 1] = 600 + cut[0]
    return tokens


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=90) | st.lists(st.integers(0, 30), max_size=60).map(lambda part: part * 4),
    st.integers(2, 5),
    st.integers(2, 30),
)
def test_every_text_is_cut_where_the_rule_cuts_it(tokens: list[int], min_repeats: int, min_tokens: int) -> None:
    assert found(tokens, min_repeats, min_tokens) == expected(tokens, min_repeats, min_tokens)


def test_a_token_costs_one_step_per_earlier_place_of_it_among_the_last_64() -> None:
    detector = LoopDetector(1000, 1000)
    for _ in range(500):
        assert detector.take(7) is None
    assert len(detector._runs) == MAX_PERIOD
    assert max(map(len, detector._places.values())) == MAX_PERIOD


def state(**options: int) -> RequestState:
    return RequestState(Request("a", "p", sampling=Sampling(max_new_tokens=12, stop_loops=3, **options)), 1, 0)


def take(of: RequestState, tokens: Sequence[int]) -> int:
    return of.take(tokens, [0.0] * len(tokens), frozenset([2]), lambda ids: " ".join(map(str, ids)))


def test_tokens_behind_the_loop_that_one_step_accepted_are_cut() -> None:
    own = state(min_loop_tokens=6)
    assert take(own, [9]) == 1
    assert take(own, [4, 5, 4, 5, 4, 5, 4, 5]) == 6
    assert (own.finish_reason, own.loop_start, own.token_ids) == ("looped", 1, [9, 4, 5, 4, 5, 4, 5])


def test_an_end_of_text_that_closes_a_loop_is_an_end_of_text_and_a_loop_at_the_last_token_is_a_loop() -> None:
    own = state(min_loop_tokens=3)
    assert take(own, [2, 2, 2]) == 1
    assert (own.finish_reason, own.loop_start) == ("stop", None)
    own = state(min_loop_tokens=12)
    take(own, [4] * 12)
    assert (own.finish_reason, own.loop_start) == ("looped", 0)


def test_without_the_option_nothing_is_detected() -> None:
    own = RequestState(Request("a", "p", sampling=Sampling(max_new_tokens=500)), 1, 0)
    assert take(own, [4] * 500) == 500
    assert (own.finish_reason, own.loops) == ("length", None)
    assert LoopDetector(2, 2).take(4) != Loop(0, 1)
