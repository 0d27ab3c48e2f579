"""Covering sets of products run in `make test` and `make test-all`, whole products in `make test-product`."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import combinations, product

import pytest
from _pytest.mark import ParameterSet

Case = tuple[Hashable, ...]


def covering(cases: Sequence[Case], strength: int) -> list[Case]:
    """A subset with every combination of `strength` values that any case has; greedy and deterministic."""
    contained = {case: set(combinations(enumerate(case), strength)) for case in cases}
    missing = set().union(*contained.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(contained[case] & missing))
        chosen.append(best)
        missing -= contained[best]
    return chosen


def tiers(
    names: str, *axes: Sequence[Hashable], strength: int = 2, fast: Collection[Hashable] | None = None
) -> pytest.MarkDecorator:
    """Parametrize over the product of `axes`, where a tuple is the value of several names.

    Each value occurs once in `make test`, each combination of `strength` values in `make test-all`. With `fast`,
    `make test` has only cases with one of these as value of the first name.
    """
    cases = list(product(*axes))
    first, chosen = covering(cases, 1), covering(cases, strength)
    params = []
    for case in cases:
        values = [value for part in case for value in (part if isinstance(part, tuple) else (part,))]
        is_fast = case in first and (fast is None or values[0] in fast)
        marks = () if is_fast else pytest.mark.slow if case in first or case in chosen else pytest.mark.full
        params.append(pytest.param(*values, id="-".join(map(str, values)), marks=marks))
    return pytest.mark.parametrize([name.strip() for name in names.split(",")], params)


def by_tier(values: Iterable[object], fast: int, slow: int) -> list[ParameterSet]:
    """Values for `parametrize`: some run in `make test`, more in `make test-all`, the rest in `make test-product`."""
    marks = [(), pytest.mark.slow, pytest.mark.full]
    return [
        pytest.param(value, marks=marks[(index >= fast) + (index >= fast + slow)]) for index, value in enumerate(values)
    ]
