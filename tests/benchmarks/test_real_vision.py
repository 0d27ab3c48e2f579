"""The settings of the vision pair's benchmark are jobs, and its committed results are theirs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real import vision
from benchmarks.real.vision import RESULTS, main, trained_drafters
from benchmarks.real.vision_settings import CLIP_FRAMES, DRAFTERS, NUM_CASES, build_cases, job_of, settings
from zoo.real_vision.quality import draw_asked
from zoo.real_vision.scenes import SEED

SETTINGS = [(scenario, name) for scenario in NUM_CASES for name in settings(scenario)]


@pytest.mark.parametrize(("scenario", "name"), SETTINGS)
def test_every_setting_is_a_valid_job(scenario: str, name: str) -> None:
    setting = settings(scenario)[name]
    job = job_of(setting, "float32")
    assert (job.model.drafter is None) == (setting.drafter is None)
    assert setting.drafter is None or setting.drafter in DRAFTERS
    assert job.sampling.temperature == (1.0 if "sampled" in name or "rejection" in name else 0.0)


def test_cases_are_scored_by_the_true_captions_attributes() -> None:
    (case, *_) = build_cases("dense", 3)
    right, stated = case.score(case.truth)  # type: ignore[misc]
    assert right == stated > 0
    assert case.score("")[0] == 0  # type: ignore[misc]


def test_the_frames_of_a_clip_show_one_scene_and_differ() -> None:
    (image, *_), (clip, *_) = build_cases("dense", 3), build_cases("clip", 3)
    assert len(image.images) == 1
    assert len(clip.images) == CLIP_FRAMES == len(clip.messages[0]["content"]) - 1
    assert (image.truth, image.messages[0]["content"][-1]) == (clip.truth, clip.messages[0]["content"][-1])
    assert len({frame.tobytes() for frame in clip.images}) > 1
    gaps = [np.abs(frame.astype(int) - image.images[0]).mean() for frame in clip.images]
    assert max(gaps) < 8


def test_training_scenes_are_no_held_out_scenes() -> None:
    taught = {repr(scene.things) for scene, _ in draw_asked("train", 40, SEED)}
    asked = {repr(scene.things) for scene, _ in draw_asked("held_out", 40, SEED)}
    assert len(taught) == len(asked) == 40
    assert not taught & asked


@pytest.mark.parametrize("scenario", NUM_CASES)
def test_the_committed_results_are_those_of_the_settings(scenario: str) -> None:
    measured = json.loads(RESULTS[scenario].read_text())
    assert measured["drafters"] == trained_drafters()
    assert set(measured["methods"]) <= set(settings(scenario))
    assert {
        name: one["num_cases"] for run in measured["methods"].values() for name, one in run["scenarios"].items()
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
