"""Tests a pairwise covering set of method × family × batch × mode; `make test-product` runs the full product."""

from __future__ import annotations

from itertools import combinations

import pytest

from decoding import Engine
from tests import toys
from tests.conformance import checks, methods

CASES = methods.covering_cases()
_LAST = sorted(CASES, key=lambda case: (case[1] in ("llama", "llava"), case[2] > 1))
FIRST = list({case[0]: case for case in _LAST}.values())
"""One case of every method: of a small family and with several slots, if there is one."""
OTHERS = [case for case in CASES if case not in FIRST]


@pytest.mark.parametrize("case", FIRST, ids=["-".join(map(str, case)) for case in FIRST])
def test_the_output_is_the_targets_own(case: methods.Case) -> None:
    methods.check_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=["-".join(map(str, case)) for case in OTHERS])
def test_other_cases_are_the_targets_own(case: methods.Case) -> None:
    methods.check_case(case)


# Drafts of suffix decoding follow from the order in which samples finish; plain decoding has none.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in methods.METHODS if name not in ("plain", "suffix")])
def test_acceptance_in_a_batch_equals_acceptance_alone_sample_by_sample(name: str) -> None:
    make, families = methods.METHODS[name]
    family = "llava" if "llava" in families else families[0]
    wanted = checks.requests(family, 7, methods.MODES["sampled"])
    results = []
    for slots, order in ((1, wanted), (4, wanted[::-1])):
        done = checks.run(Engine(toys.target(family), make(family), slots, 160), order)
        results.append(
            {key: (c.telemetry.acceptance_histogram, c.telemetry.num_draft_tokens) for key, c in done.items()}
        )
    assert results[0] == results[1]
    assert sum(sum(histogram[1:]) for histogram, _ in results[0].values()) > 0, "nothing was ever accepted"


def test_the_covering_set_covers_every_pair() -> None:
    def pairs(cases: list[methods.Case]) -> set[object]:
        return {pair for case in cases for pair in combinations(enumerate(case), 2)}

    assert pairs(CASES) == pairs(methods.every_case())
    assert len(CASES) < len(methods.every_case()) / 3
