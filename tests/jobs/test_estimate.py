"""`--estimate` on whole jobs with the shipped models: it predicts what the job then does, and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import caption, synthesize
from zoo import demo

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "zoo/checkpoints"
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a command with `--json` printed: one JSON object, and nothing else."""
    estimate: dict[str, Any] = json.loads(capsys.readouterr().out)
    return estimate


def test_a_caption_pilot_predicts_the_cost_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.write_sources(demo.draw_rows(48, demo.SEED), tmp_path / "source")
    arguments = [
        *("--config", str(ROOT / "configs/jobs/demo_caption.yaml"), *demo.KINDS["parquet"], "source.span_max_rows=4"),
        *(f"source.path={tmp_path}/source/parquet", f"sink.path={tmp_path}/out", "sampling.max_new_tokens=6"),
        *(f"model.target.path={PAIR}/caption_target", f"model.drafter.path={PAIR}/caption_drafter"),
        *("job.progress=false", "pool.torch_threads=1"),
    ]
    assert caption.main([*arguments, "--estimate", "16", "--price-per-hour", "3", "--json"]) == 0
    assert not (tmp_path / "out").exists()
    estimate = printed_json(capsys)
    assert caption.main(arguments) == 0
    done = json.loads((tmp_path / "out/_job/summary.json").read_text())
    num_rows = done["num_samples"]
    assert (estimate["samples"]["value"], estimate["rows"]["value"]) == (num_rows, num_rows)
    assert estimate["pilot_samples"] == 16
    assert estimate["tokens"]["low"] <= done["num_generated_tokens"] <= estimate["tokens"]["high"] * 1.05
    assert estimate["cost"]["value"] == pytest.approx(3 * estimate["device_hours"]["value"])
    assert estimate["device"] == "core"
    # Each sample is decoded several times, and never counted twice. Outputs of 6 tokens may be too short for a verdict;
    # a note then gives the reason.
    assert estimate["pilot_rows"] > 256
    assert estimate["mean_acceptance_length"] > 1.5, "rows of plain decoding were counted"
    assert (estimate["verdict"] is None) == any("too few rows" in note for note in estimate["notes"])
    assert caption.main([*arguments, "--estimate", "12"]) == 0
    assert "nothing is missing in" in capsys.readouterr().out


def test_a_pilot_of_images_counts_every_image_of_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(
        pa.table({"id": ["a", "b", "c"], "prompt": ["", "", ""], "label": [0, 1, 2]}), tmp_path / "labels.parquet"
    )
    arguments = [
        *("--config", str(ROOT / "configs/jobs/zoo_images_class_plain.yaml"), f"source.path={tmp_path}/labels.parquet"),
        *(f"sink.path={tmp_path}/out", "sampling.num_images_per_prompt=2", "job.progress=false"),
        *(f"model.target.path={PAIR}/image_class_target", f"model.vq.path={PAIR}/image_vq"),
    ]
    assert synthesize.main([*arguments, "--estimate", "2", "--rows", "1000000", "--json"]) == 0
    estimate = printed_json(capsys)
    assert (estimate["samples"]["value"], estimate["rows"]["value"]) == (1_000_000, 2_000_000)
    assert not (tmp_path / "out").exists()


def test_an_estimate_takes_neither_a_limit_nor_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(ROOT / "configs/jobs/demo_caption.yaml"), "--estimate", "2"]
    assert caption.main([*arguments, "--limit", "3"]) == 2
    assert caption.main([*arguments, "--dry-run"]) == 2
    assert "--estimate: takes neither --limit nor --dry-run" in capsys.readouterr().err
    for words in (["--rows", "9"], ["--json"], ["--price-per-hour", "2"]):
        assert caption.main([*arguments[:2], *words]) == 2
        assert f"{words[0]}: belongs to --estimate" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        caption.main([*arguments, "--price-per-hour", "-1"])
