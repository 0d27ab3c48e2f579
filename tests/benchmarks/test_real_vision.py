"""The settings of the vision pair's benchmark are jobs, and its claims read them and fall when their numbers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.claims import Measured
from benchmarks.real import vision
from benchmarks.real.vision import RESULTS, main, trained_drafters
from benchmarks.real.vision_claims import check_claims, num_to_decide
from benchmarks.real.vision_settings import CLIP_FRAMES, DRAFTERS, NUM_CASES, build_cases, job_of, settings
from zoo.real_vision.quality import draw_asked
from zoo.real_vision.scenes import SEED

SETTINGS = [(scenario, name) for scenario in NUM_CASES for name in settings(scenario)]


def results(scenario: str, length: float = 3.0) -> dict[str, Any]:
    """Results of all settings with the same figures."""
    cell = {
        "num_cases": 36,
        "mean_acceptance_length": length,
        "acceptance_length_se": 0.01,
        "drafted_per_step": 5.0,
        "accuracy": 0.9,
        "accuracy_se": 0.01,
        "equal_share": 1.0,
    }
    kinds = dict.fromkeys(settings(scenario), ("lossless", "exact"))
    kinds |= {name: ("lossy", name.split("/")[0]) for name in kinds if name.split("/")[0] in ("lvspec", "random")}
    return {
        "scenario": scenario,
        "methods": {
            name: {"verify_mode": mode, "acceptance": rule, "scenarios": {scenario: dict(cell)}}
            for name, (mode, rule) in kinds.items()
        },
    }


@pytest.mark.parametrize(("scenario", "name"), SETTINGS)
def test_every_setting_is_a_valid_job(scenario: str, name: str) -> None:
    setting = settings(scenario)[name]
    job = job_of(setting, "float32")
    assert (job.model.drafter is None) == (setting.drafter is None)
    assert setting.drafter is None or setting.drafter in DRAFTERS
    assert job.sampling.temperature == (1.0 if "sampled" in name or "rejection" in name else 0.0)


@pytest.mark.parametrize("scenario", NUM_CASES)
def test_every_claim_reads_settings_that_are_measured(scenario: str) -> None:
    found = check_claims(results(scenario))
    assert [one["claim"] for one in found if "not run" in one["numbers"]] == []
    empty = check_claims({"scenario": scenario, "methods": {}})
    assert all("not run" in one["numbers"] or "0 settings" in one["numbers"] for one in empty)


@pytest.mark.parametrize("scenario", NUM_CASES)
def test_claims_fall_when_their_numbers_do(scenario: str) -> None:
    changed = results(scenario)
    cells = {name: one["scenarios"][scenario] for name, one in changed["methods"].items()}
    cells["specvlm/weak"]["mean_acceptance_length"] = 2.0
    cells["lvspec/strong"]["accuracy"] = 0.5
    cells["tabed_mt/strong"]["mean_acceptance_length"] = 1.0
    cells["sd_tree/strong"]["equal_share"] = 0.9
    verdicts = {one["claim"]: one["holds"] for one in check_claims(changed)}
    for begin in ("TABED is best", "LVSpec keeps", "Pruning 90 %", "Every lossless"):
        assert next(holds for text, holds in verdicts.items() if text.startswith(begin)) is False


def test_the_caption_context_loses_if_its_captions_do() -> None:
    changed = results("dense")
    changed["methods"]["sd_chain_caption/strong"]["scenarios"]["dense"]["mean_acceptance_length"] = 2.0
    changed["methods"]["tabed_mt_tree3/strong"]["scenarios"]["dense"]["mean_acceptance_length"] = 1.0
    verdicts = {one["claim"]: one["holds"] for one in check_claims(changed)}
    for begin in ("Of the four contexts alone", "TABED on token trees"):
        assert next(holds for text, holds in verdicts.items() if text.startswith(begin)) is False


def test_the_number_that_would_decide_a_gap_follows_from_its_error() -> None:
    own, other = Measured(3.1, 0.1, 36), Measured(3.0, 0.0, 36)
    # The error falls with the root of the number: 2 · 0.1 / 0.1 = 2 needs four times as many.
    assert num_to_decide(own, other) == "about 144 scenes would decide"
    assert num_to_decide(own, own).startswith("no number")


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
def test_the_committed_claims_follow_from_the_committed_numbers_of_the_shipped_drafters(scenario: str) -> None:
    measured = json.loads(RESULTS[scenario].read_text())
    assert measured["claims"] == check_claims(measured)
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
