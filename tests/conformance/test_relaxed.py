"""Lossy rules in the engine: exact at their zero setting, and correct counts of relaxed tokens."""

from __future__ import annotations

import pytest

from decoding import Sampling
from decoding.acceptance import LVSpec
from tests.conformance import relaxation
from tests.covering import tiers

pytestmark = pytest.mark.slow

FAMILY = "llava"
COVERING = (("chain", 4, 0.0), ("two-branches", 9, 0.8), ("ragged", 9, 0.0), ("chain", 1, 0.8))
"""Trees, batch sizes and temperatures for every rule."""


@tiers("name, tree, slots, temperature", list(relaxation.LOOSE), COVERING, strength=1)
def test_every_token_that_differs_from_the_targets_choice_is_counted_as_relaxed(
    name: str, tree: str, slots: int, temperature: float
) -> None:
    num_relaxed, num_accepted = relaxation.check_honest(FAMILY, tree, relaxation.LOOSE[name](), slots, temperature)
    assert 0 < num_relaxed < num_accepted


@pytest.mark.parametrize(
    ("name", "tree", "sampling"),
    [
        ("lvspec-shift", "chain", Sampling()),
        ("lvspec-shift", "two-branches", relaxation.SAMPLED),
        ("fly", "chain", relaxation.SAMPLED),
        ("random", "two-branches", relaxation.SAMPLED),
        ("typical", "two-branches", Sampling()),
        ("lantern", "two-branches", relaxation.SAMPLED),
    ],
    ids=lambda value: {0.0: "greedy"}.get(value.temperature, "sampled") if isinstance(value, Sampling) else value,
)
def test_text_and_acceptance_do_not_depend_on_batch_order_or_slot(name: str, tree: str, sampling: Sampling) -> None:
    relaxation.check_independence(FAMILY, tree, relaxation.LOOSE[name], sampling)


def test_a_larger_share_accepts_more() -> None:
    results = [
        relaxation.check_honest(FAMILY, "chain", LVSpec(loose, 3, False), 9, 0.0) for loose in (0.0, 0.3, 0.7, 1.0)
    ]
    relaxed, accepted = zip(*results, strict=True)
    assert relaxed[0] == 0
    assert list(relaxed) == sorted(relaxed)
    assert list(accepted) == sorted(accepted)
