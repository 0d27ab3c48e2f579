"""`method.auto` in whole jobs with the shipped models: rows as plain decoding gives them, and a table of the trial."""

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


def rows_of(output: Path) -> dict[str, dict[str, Any]]:
    rows = [row for path in (output / "data").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    rows_by_id = {row["sample_id"]: row for row in rows}
    assert len(rows_by_id) == len(rows)
    return rows_by_id


def test_a_caption_job_keeps_one_of_its_methods_and_its_texts_are_those_of_plain_decoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.write_sources(demo.draw_rows(220, demo.SEED), tmp_path / "source")
    paths = [
        *(f"source.path={tmp_path}/source/parquet", "sampling.max_new_tokens=6", "job.progress=false"),
        *(f"model.target.path={PAIR}/caption_target", f"model.drafter.path={PAIR}/caption_drafter"),
    ]
    plain = ["--config", str(ROOT / "configs/jobs/demo_caption.yaml"), *paths, "method.drafter.kind=none"]
    assert caption.main([*plain, f"sink.path={tmp_path}/plain"]) == 0
    auto = ["--config", str(ROOT / "configs/jobs/demo_auto.yaml"), *paths, "method.auto.max_rounds=1", "pool.slots=2"]
    assert caption.main([*auto, f"sink.path={tmp_path}/auto", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "each engine tries 3 methods on its first rows" in output
    assert "after 3 blocks of 16 rows or more (48) or sooner; all rows are results" in output
    assert "chain-6 drafter model, tree chain length=6, acceptance exact" in output
    assert not (tmp_path / "auto").exists()
    assert caption.main([*auto, f"sink.path={tmp_path}/auto"]) == 0
    expected, rows = rows_of(tmp_path / "plain"), rows_of(tmp_path / "auto")
    assert {key: row["generated_text"] for key, row in rows.items()} == {
        key: row["generated_text"] for key, row in expected.items()
    }
    assert {row["method"] for row in rows.values()} == {"plain", "chain-3", "chain-6"}
    assert {row["verify_mode"] for row in rows.values()} == {"lossless"}
    drafter_id = next(row["drafter_id"] for row in rows.values() if row["method"] == "chain-3")
    assert drafter_id.startswith(str(PAIR / "caption_drafter"))
    for row in rows.values():
        depth = {"plain": 0, "chain-3": 3, "chain-6": 6}[row["method"]]
        assert len(row["telemetry"]["acceptance_histogram"]) == depth + 1
        assert row["drafter_id"] == (drafter_id if row["method"].startswith("chain") else "")
    summary = json.loads((tmp_path / "auto/_job/summary.json").read_text())
    [choice] = summary["waits"]["choices"]
    assert choice["reason"] == "first rows"
    assert {candidate["method"] for candidate in choice["standings"]} == {"plain", "chain-3", "chain-6"}
    assert [candidate["note"] for candidate in choice["standings"] if candidate["method"] == choice["method"]] == [
        "chosen"
    ]
    assert all(candidate["sample_s"] > 0 and candidate["num_rows"] >= 12 for candidate in choice["standings"])
    assert summary["by_method"][choice["method"]] == max(summary["by_method"].values())
    assert sum(summary["by_method"].values()) == len(rows)
    output = capsys.readouterr().out
    assert f"kept {choice['method']}" in " ".join(output.split())
    assert "ms per sample" in output
    assert caption.main([*auto, f"sink.path={tmp_path}/auto"]) == 0
    assert "nothing is missing in" in capsys.readouterr().out


def test_an_image_job_draws_the_codes_of_plain_decoding(tmp_path: Path) -> None:
    labels = pa.table({"id": ["a", "b", "c", "d"], "prompt": [""] * 4, "label": [0, 1, 2, 3]})
    pq.write_table(labels, tmp_path / "labels.parquet")
    arguments = [
        *("--config", str(ROOT / "configs/jobs/zoo_images_class_plain.yaml"), f"source.path={tmp_path}/labels.parquet"),
        *("sampling.num_images_per_prompt=14", "job.progress=false", "pool.slots=8"),
        *(f"model.target.path={PAIR}/image_class_target", "sink.images=false", "sink.keep_codes=true"),
    ]
    auto = ["method={auto: {max_rounds: 1, candidates: [{drafter: {kind: lookup}, tree: {kind: chain, length: 2}}]}}"]
    assert synthesize.main([*arguments, f"sink.path={tmp_path}/plain"]) == 0
    assert synthesize.main([*arguments, *auto, f"sink.path={tmp_path}/auto"]) == 0
    expected, rows = rows_of(tmp_path / "plain"), rows_of(tmp_path / "auto")
    assert {key: tuple(row["codes"]) for key, row in rows.items()} == {
        key: tuple(row["codes"]) for key, row in expected.items()
    }
    assert {row["method"] for row in rows.values()} == {"plain", "lookup+chain+exact"}
    assert len(json.loads((tmp_path / "auto/_job/summary.json").read_text())["waits"]["choices"]) == 1
