"""Rejection sampling and shared-noise sampling both draw from the target's own distribution."""

from __future__ import annotations

import pytest

from decoding import Sampling
from decoding.acceptance import Exact, Rejection
from decoding.contracts import Acceptance
from tests.conformance import checks

pytestmark = pytest.mark.slow

NUM_DRAWS = 3000
LIMIT = 2.1
"""Chi-square per degree of freedom; at 20 to 26 degrees the right distribution exceeds it once in a thousand runs."""


@pytest.mark.parametrize("drafter", ["perturbed", "loose", "wrong"])
@pytest.mark.parametrize("tree", ["chain", "branching"])
@pytest.mark.parametrize("rule", [Exact(), Rejection()], ids=["exact", "rejection"])
def test_the_joint_distribution_of_two_verified_tokens_is_the_targets(
    rule: Acceptance, tree: str, drafter: str
) -> None:
    assert checks.joint_of_two_tokens(checks.TREES[tree], rule, NUM_DRAWS, drafter) < LIMIT


@pytest.mark.parametrize("tree", list(checks.TREES))
def test_rejection_at_temperature_zero_is_greedy_decoding(tree: str) -> None:
    checks.check_greedy("llava", tree, "perturbed", 4, rule=Rejection())


def test_rejection_accepts_everything_when_drafter_and_target_agree() -> None:
    result = checks.run_rejection("right", Sampling(temperature=1.0, max_new_tokens=20))
    assert result.num_accepted_draft_tokens == result.num_draft_tokens > 0


def test_rejection_accepts_far_fewer_drafts_of_an_unrelated_drafter() -> None:
    result = checks.run_rejection("wrong", Sampling(temperature=1.0, max_new_tokens=20))
    assert result.draft_acceptance_rate < 0.3
