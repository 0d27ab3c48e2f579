"""Five kills of a job, one in each named phase; `make chaos` is fifty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos import kills

pytestmark = pytest.mark.slow


def test_a_job_killed_in_every_phase_has_the_output_of_an_undisturbed_job(tmp_path: Path) -> None:
    results = kills.run(tmp_path, len(kills.PHASES), seed=1)
    assert results["kills_by_phase"] == dict.fromkeys(kills.PHASES, 1)
    assert all(job["num_admitted"] <= job["num_bound"] for job in results["jobs"])


def test_the_50_recorded_kills_are_of_every_phase_and_within_their_bounds() -> None:
    results = json.loads(kills.RESULTS.read_text())
    assert results["num_kills"] == 50
    assert results["kills_by_phase"] == dict.fromkeys(kills.PHASES, 10)
    assert sum(job["num_kills"] for job in results["jobs"]) == 50
    assert all(kills.NUM_ROWS <= job["num_admitted"] <= job["num_bound"] for job in results["jobs"])
