"""Tests the training rows of image drafters."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from models.llamagen.vq import Vq
from zoo.image.gpt import NUM_CLASSES, draw_scenes
from zoo.image.vq import VQ_SHAPE, pixels_of
from zoo.synthesis_rows import main, write_rows
from zoo.world.grain import parse_prompt, render_grainy


@pytest.fixture(scope="module")
def vq() -> Vq:
    torch.manual_seed(0)
    return Vq(VQ_SHAPE).eval()


def test_rows_hold_the_codes_of_their_pictures(tmp_path: Path, vq: Vq) -> None:
    write_rows(tmp_path / "a" / "rows.parquet", vq, "text", "train", 4, seed=1000)
    rows = pq.read_table(tmp_path / "a" / "rows.parquet").to_pylist()
    assert [row["sample_id"] for row in rows] == [f"train-1000-{n}" for n in range(4)]
    for row, scene in zip(rows, draw_scenes("text", "train", 4, 1000), strict=True):
        assert parse_prompt(row["prompt"]) == (scene.things, scene.tone)
        assert vq.encode(pixels_of([render_grainy(scene)])).flatten().tolist() == row["codes"]
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["rows.parquet"]


def test_rows_of_classes_have_labels_and_one_object(tmp_path: Path, vq: Vq) -> None:
    write_rows(tmp_path / "rows.parquet", vq, "class", "held_out", 3, seed=0)
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.column_names == ["sample_id", "prompt", "codes", "label"]
    for row in table.to_pylist():
        assert 0 <= row["label"] < NUM_CLASSES
        assert len(parse_prompt(row["prompt"])[0]) == 1
        assert len(row["codes"]) == 144


def test_the_same_seed_writes_the_same_rows_and_a_longer_file_begins_like_a_shorter(tmp_path: Path, vq: Vq) -> None:
    write_rows(tmp_path / "short.parquet", vq, "text", "train", 2, seed=5)
    write_rows(tmp_path / "long.parquet", vq, "text", "train", 52, seed=5)
    short, long = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("short", "long"))
    assert long[:2] == short
    assert len({row["sample_id"] for row in long}) == 52


def test_a_number_of_rows_below_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "rows.parquet"), "--rows", "0"])
    assert "--rows must be at least 1" in capsys.readouterr().err
