"""`draftfleet compare` on whole jobs of the shipped text pair: one table, resumed, with parts of users."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from jobs import compare as command
from pipeline.compare import plots
from zoo.text import held_out_questions
from zoo.world import listing

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 48


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    prompts = [listing.write_prompt(*asked) for asked in held_out_questions(NUM_ROWS, 5)]
    (tmp_path / "src/a.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    pair = ROOT / "zoo/checkpoints"
    job: dict[str, Any] = {
        "source": {"kind": "text", "path": str(tmp_path / "src")},
        "prompt": "{text}",
        "model": {
            "target": {"path": str(pair / "text_target"), "dtype": "float32"},
            "drafter": {"path": str(pair / "text_drafter"), "dtype": "float32"},
        },
        "method": "sd_chain_text",
        "sampling": {"max_new_tokens": 20},
        "pool": {"slots": 8, "max_context_tokens": 256},
        "sink": {"path": str(tmp_path / "unused")},
        "job": {"progress": False},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    lossy = {"drafter": {"kind": "model"}, "tree": {"kind": "chain", "length": 4}}
    lossy["acceptance"] = {"kind": "random", "probability": 0.9}
    drafter = {"path": str(pair / "text_drafter"), "dtype": "float32"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"method": lossy, "model": {"drafter": drafter}}))
    return tmp_path


def arguments(folder: Path, methods: str, *more: str) -> list[str]:
    return ["--config", str(folder / "job.yaml"), "--methods", methods, "--output", str(folder / "out"), *more]


@pytest.mark.slow
def test_methods_run_on_the_same_rows_and_are_compared_with_plain(
    folder: Path, local_ray: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = f"sd_chain_text,suffix,{folder}/mine.yaml"
    assert command.main(arguments(folder, methods, "--limit", "40")) == 0
    out = capsys.readouterr().out
    assert [line.split(": ")[1] for line in out.splitlines() if " of 4: " in line] == [
        "plain",
        "sd_chain_text",
        "suffix",
        "mine",
    ]
    rows = {row["name"]: row for row in csv.DictReader((folder / "out/comparison.csv").read_text().splitlines())}
    assert {name: (row["lossless"], row["num_rows"]) for name, row in rows.items()} == {
        "plain": ("True", "40"),
        "sd_chain_text": ("True", "40"),
        "suffix": ("True", "40"),
        "mine": ("False", "40"),
    }
    assert [float(rows[name]["equal"]) for name in ("plain", "sd_chain_text", "suffix")] == [1.0, 1.0, 1.0]
    assert float(rows["mine"]["equal"]) < 1.0
    assert float(rows["mine"]["loss"]) > 0.0
    assert float(rows["sd_chain_text"]["acceptance_length"]) > 1.5 > float(rows["plain"]["acceptance_length"]) == 1.0
    for row in rows.values():
        assert float(row["speedup_low"]) <= float(row["speedup"]) <= float(row["speedup_high"])
    found = json.loads((folder / "out/comparison.json").read_text())
    assert found["recommended"] in ("plain", "sd_chain_text", "suffix")
    assert f"recommended: {found['recommended']}: {found['reason']}" in out
    table = (folder / "out/comparison.md").read_text()
    assert "| sd_chain_text |" in table
    assert found["reason"][1:] in table
    for name in ("speed_over_loss.png", "acceptance_by_position.png"):
        assert (folder / "out" / name).read_bytes().startswith(b"\x89PNG")
    # The figures are those of the outputs: an independent count of plain decoding's engine time.
    telemetry = pq.read_table(folder / "out/plain/data")["telemetry"].to_pylist()
    seconds = sum(entry[phase] for entry in telemetry for phase in ("prefill_ms", "draft_ms", "verify_ms")) / 1000
    assert float(rows["plain"]["rows_per_s"]) == pytest.approx(40 / seconds)

    # The same command resumes: nothing is decoded again. Without matplotlib, one line names it.
    attempts = sorted(path.name for path in folder.glob("out/*/_job/attempts/*"))
    monkeypatch.setattr(plots, "can_draw", lambda: False)
    assert command.main(arguments(folder, methods, "--limit", "40")) == 0
    again = capsys.readouterr().out
    assert again.count("nothing is missing in") == 4
    assert again.splitlines()[-1] == plots.NO_MATPLOTLIB
    assert sorted(path.name for path in folder.glob("out/*/_job/attempts/*")) == attempts
    assert json.loads((folder / "out/comparison.json").read_text()) == found


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        ("plain,sd_chian", "--methods: no method is named 'sd_chian'; did you mean sd_chain"),
        (",", "--methods: names no method"),
        ("suffix,suffix", "--methods: two methods are named 'suffix'"),
        ("none.yaml", "none.yaml: cannot be read"),
        ("empty.yaml", "--methods: empty.yaml has no section method"),
        ("whole.yaml", "--methods: whole.yaml has pool; a method's file has the section method, and model.drafter"),
        ("suffix,eagle3", "--methods: eagle3: model.drafter"),
        ("suffix,lantern", "--methods: lantern: .*method.acceptance 'lantern'"),
        ("suffix,sd_chain_text@nowhere", "--methods: sd_chain_text-nowhere: model.drafter.* nowhere"),
    ],
)
def test_methods_that_cannot_run_are_refused_before_the_first_run(
    folder: Path,
    no_ray: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    methods: str,
    reason: str,
) -> None:
    import re

    monkeypatch.chdir(folder)
    Path("empty.yaml").write_text("model: {drafter: null}\n")
    Path("whole.yaml").write_text("method: plain\npool: {slots: 4}\n")
    assert command.main(arguments(folder, methods)) == command.REFUSED
    assert re.search(reason, capsys.readouterr().err, re.DOTALL)
    assert not (folder / "out").exists()
