"""Tests LANTERN's neighbourhood A(k, δ): worked examples, the definition, and bounds as properties."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from decoding.acceptance.neighbourhood import Neighbourhood
from tests.decoding import blocks, lantern_by_hand

#          0     1     2     3     4
TENTHS = [0.30, 0.25, 0.05, 0.15, 0.25]
NEAR = {0: [2, 3, 1, 4], 1: [4, 0, 2, 3]}


def plain_spec(num_codes: int = blocks.VOCAB_SIZE, special: frozenset[int] = frozenset()) -> Any:
    """What an image model is: no end token, no special ones."""
    return replace(blocks.spec(), vocab_size=num_codes, eos_ids=frozenset(), special_ids=special)


def table_of(rows: dict[int, list[int]], num_codes: int) -> torch.Tensor:
    return torch.tensor([rows.get(code, [c for c in range(num_codes) if c != code]) for code in range(num_codes)])


def members(
    probs: list[float],
    draft: int,
    k: int,
    delta: float,
    divergence: Any = "tvd",
    k_counts_draft: bool = True,
    **spec: Any,
) -> list[int]:
    """The neighbours in A(k, δ), nearest first, with `NEAR` as the table."""
    made = Neighbourhood(table_of(NEAR, 5), k, delta, divergence, k_counts_draft)
    made.open(plain_spec(5, **spec))
    token, q = torch.tensor([draft]), torch.tensor([probs])
    near = made.around(token)
    inside = made.members(token, q[:, draft], near, q.gather(1, near))
    return near[inside].tolist()


def test_neighbours_are_added_while_their_probability_stays_within_delta() -> None:
    # The neighbours of code 0 have 0.05, 0.15, 0.25, 0.25: sums 0.05, 0.20, 0.45, 0.70.
    assert members(TENTHS, 0, 5, 0.04) == []
    assert members(TENTHS, 0, 5, 0.06) == [2]
    assert members(TENTHS, 0, 5, 0.21) == [2, 3]
    assert members(TENTHS, 0, 5, 0.44) == [2, 3], "0.25 more would exceed it, and nothing behind it is looked at"
    assert members(TENTHS, 0, 5, 0.71) == [2, 3, 1, 4]
    # The first neighbour of code 1 has 0.25: the smaller ones after it do not replace it.
    assert members(TENTHS, 1, 5, 0.2) == []


def test_k_counts_the_draft_if_k_counts_draft_is_set() -> None:
    assert members(TENTHS, 0, 3, 1.0) == [2, 3]
    assert members(TENTHS, 0, 3, 1.0, k_counts_draft=False) == [2, 3, 1]
    assert members(TENTHS, 0, 1, 1.0) == []
    assert members(TENTHS, 0, 1, 1.0, k_counts_draft=False) == [2]


@pytest.mark.parametrize("divergence", ["tvd", "jsd", "multiplicative"])
def test_with_a_bound_of_zero_only_codes_without_probability_are_neighbours(divergence: Any) -> None:
    zero = 1.0 if divergence == "multiplicative" else 0.0
    assert members(TENTHS, 0, 5, zero, divergence) == []
    assert members([0.5, 0.5, 0.0, 1e-38, 0.0], 0, 5, zero, divergence) == [2]
    assert members([1.0, 0.0, 1e-30, 0.0, 0.0], 0, 5, zero, divergence) == []


# --- properties ----------------------------------------------------------------------------------------------------


@st.composite
def situations(draw: Any) -> tuple[list[float], int, int, list[int]]:
    num_codes = draw(st.integers(2, 12))
    logits = draw(st.lists(st.floats(-12, 12, width=32), min_size=num_codes, max_size=num_codes))
    probs = torch.tensor(logits).softmax(-1).tolist()
    draft = draw(st.integers(0, num_codes - 1))
    near = draw(st.permutations([code for code in range(num_codes) if code != draft]))
    return probs, draft, draw(st.integers(1, num_codes)), list(near)


def neighbourhood_of(
    probs: list[float], draft: int, k: int, near: list[int], delta: float, divergence: Any
) -> list[int]:
    made = Neighbourhood(table_of({draft: near}, len(probs)), k, delta, divergence, True)
    made.open(plain_spec(len(probs)))
    token, q = torch.tensor([draft]), torch.tensor([probs])
    around = made.around(token)
    return around[made.members(token, q[:, draft], around, q.gather(1, around))].tolist()


@settings(max_examples=300, deadline=None)
@given(situations(), st.floats(0, 1))
def test_the_total_variation_never_exceeds_delta_and_one_more_neighbour_would(
    situation: tuple[list[float], int, int, list[int]], delta: float
) -> None:
    """In exact arithmetic over the probabilities as they are."""
    probs, draft, k, near = situation
    lenders = neighbourhood_of(probs, draft, k, near, delta, "tvd")
    assert lenders == near[: len(lenders)], "nearest first, without gaps"
    exact = [Fraction(p) for p in probs]
    moved = list(exact)
    for token in lenders:
        moved[token], moved[draft] = Fraction(0), moved[draft] + exact[token]
    slack = Fraction(1, 10**15)
    assert sum(abs(x - y) for x, y in zip(moved, exact, strict=True)) / 2 <= Fraction(delta) + slack
    if len(lenders) < k - 1:
        one_more = sum((exact[token] for token in near[: len(lenders) + 1]), Fraction(0))
        assert one_more > Fraction(delta) - slack


@settings(max_examples=300, deadline=None)
@given(situations(), st.floats(0, 1), st.sampled_from(["tvd", "jsd", "multiplicative"]))
@example(([0.3, 0.35, 0.35], 0, 3, [1, 2]), 0.05, "multiplicative")
def test_the_closed_forms_give_the_neighbours_of_the_definition(
    situation: tuple[list[float], int, int, list[int]], delta: float, divergence: str
) -> None:
    probs, draft, k, near = situation
    bound = 1.0 + 20 * delta if divergence == "multiplicative" else delta
    values = [lantern_by_hand.divergence_of(divergence, probs, draft, near[:size]) for size in range(len(near) + 1)]
    assert values == sorted(values) or divergence == "jsd"
    assume(all(abs(value - bound) > 1e-7 for value in values))
    wanted = lantern_by_hand.lenders_of(probs, draft, near[: k - 1], divergence, bound)
    assert neighbourhood_of(probs, draft, k, near, bound, divergence) == wanted


@settings(max_examples=200, deadline=None)
@given(situations(), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["tvd", "jsd"]))
def test_a_larger_bound_and_a_larger_k_give_at_least_as_many_neighbours(
    situation: tuple[list[float], int, int, list[int]], bound: float, other: float, divergence: str
) -> None:
    probs, draft, k, near = situation
    small, large = sorted((bound, other))
    few = neighbourhood_of(probs, draft, k, near, small, divergence)
    assert few == neighbourhood_of(probs, draft, k, near, large, divergence)[: len(few)]
    assert few == neighbourhood_of(probs, draft, len(probs), near, small, divergence)[: len(few)]


# --- refused -------------------------------------------------------------------------------------------------------


def test_a_table_of_another_codebook_is_refused() -> None:
    made = Neighbourhood(torch.zeros(512, 4, dtype=torch.long), 4, 0.1, "tvd", True)
    with pytest.raises(AssertionError, match="a table of 512 codes does not fit 40 tokens"):
        made.open(plain_spec())
