"""Inputs of known values: what counts as right, as lost, and as wrong without an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import inputs
from benchmarks.harness.results import read_results, results_file
from tests.pipeline.formats.shards import encode
from tests.pipeline.media.video.files import encode_video

RED = [[255, 0, 0]] * 4
BLUE = [[0, 0, 255]] * 4
CASES: dict[str, tuple[str, Any]] = {
    "right": ("right", [{"size": [8, 6], "quadrants": RED, "parts": "it", "text": "What?", "id": "a.png#0"}]),
    "other colours": ("wrong", [{"quadrants": BLUE}]),
    "other size": ("wrong", [{"size": [6, 8]}]),
    "other text": ("wrong", [{"text": "Who?"}]),
    "other id": ("wrong", [{"id": "b.png#0"}]),
    "no error": ("wrong", [{"error": "broken_image"}]),
    "missing row": ("lost", [{"quadrants": RED}, {"quadrants": RED}]),
    "missing picture": ("lost", [{"all_quadrants": [RED, RED]}]),
    "ids": ("right", {"ids": ["a.png#0"]}),
    "missing id": ("lost", {"ids": ["a.png#0", "b.png#0"]}),
    "not refused": ("wrong", {"refused": True}),
}


def case_of(expected: Any, **source: Any) -> dict[str, Any]:
    given = {"kind": "images", "path": "files", **source}
    return {"id": "x", "what": "x", "source": given, "prompt": None, "columns": None, "expected": expected}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.png").write_bytes(encode((255, 0, 0)))
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_the_rows_of_an_input_are_compared_with_the_expected_ones(name: str, folder: Path) -> None:
    outcome, expected = CASES[name]
    assert inputs.outcome_of(case_of(expected), folder)[0] == outcome


def test_error_rows_and_refused_jobs_are_lost_unless_they_are_expected(folder: Path) -> None:
    (folder / "files" / "a.png").write_bytes(b"no image")
    assert inputs.outcome_of(case_of([{"quadrants": RED}]), folder)[0] == "lost"
    assert inputs.outcome_of(case_of([{"error": ["broken_image", "not_an_image"]}]), folder) == ("right", "")
    assert inputs.outcome_of(case_of([{}], path="nothing"), folder)[0] == "lost"
    assert inputs.outcome_of(case_of({"refused": True}, path="nothing"), folder)[0] == "right"


def test_frames_are_compared_by_their_number_and_their_middles(folder: Path) -> None:
    (folder / "files" / "a.mp4").write_bytes(encode_video(4))
    source = {"kind": "videos", "video": {"num_frames": 8}}
    assert inputs.outcome_of(case_of([{"num_frames": 4, "bars": [20, 20, 20, 20]}], **source), folder)[0] == "right"
    assert inputs.outcome_of(case_of([{"num_frames": 5}], **source), folder)[0] == "wrong"
    assert inputs.outcome_of(case_of([{"bars": [20, 20, 20, 60]}], **source), folder)[0] == "wrong"


def test_both_trees_are_counted_by_kind(folder: Path, tmp_path: Path) -> None:
    cases = [case_of([{"quadrants": colours}]) | {"id": name} for name, colours in (("a", RED), ("b", BLUE))]
    (folder / "manifest.json").write_text(json.dumps([*cases, case_of([]) | {"files_here": False}]))
    results = tmp_path / "inputs.json"
    for tree in ("before", "after"):
        inputs.main([str(folder), "--tree", tree, "--results", str(results)])
    written = read_results(results)
    assert (written["num_cases"], written["num_measured"]) == (3, 2)
    assert [case["id"] for case in written["remaining"]] == ["b"]
    assert [row["kind"] for row in written["kinds"]] == ["images", "all"]
    assert all((row["wrong_before"], row["right_after"], row["lost_after"]) == (1, 1, 0) for row in written["kinds"])


def test_the_recorded_counts_are_those_of_the_recorded_inputs() -> None:
    results = read_results(results_file("inputs"))
    assert results["kinds"] == inputs.counts(results["cases"])
    assert len(results["cases"]) == 200
