"""A few of the runs of `make chaos` with attempts that overlap, and what its recorded hundred came to."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.chaos import overlaps

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", overlaps.WHERE)
def test_overlapping_attempts_leave_every_id_once(tmp_path: Path, kind: str) -> None:
    done = overlaps.run_one(tmp_path / "run", kind, random.Random(len(kind)))
    assert done["exit_codes"][1] == overlaps.DONE


def test_a_store_without_conditional_put_is_refused_at_the_start(tmp_path: Path) -> None:
    assert overlaps.run_unconditional(tmp_path / "run")["exit_codes"] == [2, overlaps.DONE]


def test_the_100_recorded_overlaps_are_of_every_kind_and_most_superseded_attempts_were_fenced() -> None:
    results = json.loads(overlaps.RESULTS.read_text())
    assert results["num_runs"] == len(results["runs"]) == 100
    kinds = {"delayed": 30, "frozen": 20, "overlapping": 30, "stopped": 15, "unconditional": 5}
    assert results["runs_by_kind"] == kinds
    assert results["num_stopped"] == kinds["stopped"]
    held_up = [run for run in results["runs"] if run["kind"] in ("delayed", "frozen")]
    others = [run for run in held_up if run["exit_codes"][0] != overlaps.FENCED]
    for run in others:
        assert run["exit_codes"][0] in overlaps.exceptions(run["phase"], run["place"], "shard" in run)
    assert len(others) <= 5
    assert all(run["exit_codes"][1] == overlaps.DONE for run in results["runs"])
