"""The settings of the vision pair's benchmark are jobs, and its committed results are theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.real import vision
from benchmarks.real.vision import RESULTS, main, trained_drafters
from benchmarks.real.vision_settings import DRAFTERS, NUM_CASES, job_of, settings

SETTINGS = [(scenario, name) for scenario in NUM_CASES for name in settings(scenario)]


@pytest.mark.parametrize(("scenario", "name"), SETTINGS)
def test_every_setting_is_a_valid_job(scenario: str, name: str) -> None:
    setting = settings(scenario)[name]
    job = job_of(setting, "float32")
    assert (job.model.drafter is None) == (setting.drafter is None)
    assert setting.drafter is None or setting.drafter in DRAFTERS
    assert job.sampling.temperature == (1.0 if "sampled" in name or "rejection" in name else 0.0)


@pytest.mark.parametrize("scenario", NUM_CASES)
def test_the_committed_results_are_those_of_the_settings(scenario: str) -> None:
    measured = json.loads(RESULTS[scenario].read_text())
    assert measured["drafters"] == trained_drafters()
    assert set(measured["methods"]) <= set(settings(scenario))
    assert {
        name: scenario["num_cases"]
        for run in measured["methods"].values()
        for name, scenario in run["scenarios"].items()
    } == {scenario: NUM_CASES[scenario]}


def test_results_of_other_drafters_are_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    drafters = trained_drafters()
    drafters["weak"]["sha256"] = "another"
    path.write_text(json.dumps({"drafters": drafters, "methods": {}}))
    monkeypatch.setitem(RESULTS, "dense", path)
    monkeypatch.setattr(vision, "FOLDER", tmp_path)
    monkeypatch.setattr(vision, "DRAFTERS", {})
    (tmp_path / "target").mkdir()
    assert main([]) == 2
    assert "measured with other drafters" in capsys.readouterr().err
