"""Tests the mapping of columns to training rows, and the choice of held-out rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.training.samples import TrainingRow
from configs.load import ConfigError, validate
from configs.source import OLDER
from configs.training import TrainDrafterJobConfig
from models.llamagen.shape import GptShape
from pipeline.manifest.datasource import SpanDatasource
from pipeline.media.image_decoding import DecodeOptions
from pipeline.prompts.row_options import PromptOptions
from pipeline.prompts.templates import placeholders
from pipeline.training import run
from pipeline.training.inputs import open_inputs
from pipeline.training.output import claim_output
from pipeline.training.rows import freeze_source, is_held_out, read_rows

SHAPE = GptShape(32, 1, 4, 48, 60, 2, "text", 7, condition_dim=3)
SPECIAL = ("</s>", "<image>")


def job(path: Path, **changes: Any) -> TrainDrafterJobConfig:
    kind = "jsonl" if path.suffix == ".jsonl" else "parquet"
    data = {"source": {"kind": kind, "path": str(path), "id_column": "id"}, "target": {"path": "x"}}
    return validate(TrainDrafterJobConfig, data | {"output": {"path": "x"}} | changes, "a test")


def rows_of(made: TrainDrafterJobConfig) -> list[TrainingRow | str]:
    manifest = freeze_source(made)
    table = SpanDatasource(made.source, manifest, tuple(placeholders(made.prompt))).read(0)
    options = DecodeOptions.of(made.source, manifest.root, PromptOptions(made.prompt, special_tokens=SPECIAL))
    return read_rows(table, made, options, SHAPE)


def write(folder: Path, kind: str, columns: dict[str, list[Any]]) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        names = list(columns)
        lines = [json.dumps(dict(zip(names, row))) for row in zip(*columns.values(), strict=True)]
        path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_prompts_and_answers_bring_no_special_tokens_with_them(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind, {"id": ["a", "b"], "q": ["<image> what", "x"], "a": ["no</s> more", None]})
    rows = rows_of(job(path, prompt="say {q}", answer_column="a"))
    assert isinstance(rows[0], TrainingRow)
    assert isinstance(rows[1], TrainingRow)
    assert rows[0].messages[0]["content"] == [{"type": "text", "text": "say < image> what"}]
    assert (rows[0].answer, rows[1].answer) == ("no< /s> more", None)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_codes_and_conditions_come_typed_or_as_text(kind: str, tmp_path: Path) -> None:
    codes = [[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 0]]
    features = [[[0.5, 1.0, 2.0]], [[0.0, 1.5, 0.0], [1.0, 1.0, 1.0]], [[1.0, 2.0]]]
    path = write(tmp_path, kind, {"id": ["a", "b", "c"], "codes": codes, "f": features, "label": [3, 999, 7000]})
    rows = rows_of(job(path, image={"columns": {"codes": "codes", "features": "f"}}))
    assert rows[2] == "invalid_condition"
    for index in (0, 1):
        row = rows[index]
        assert isinstance(row, TrainingRow)
        assert row.codes is not None
        assert row.codes.tolist() == codes[index]
        assert isinstance(row.condition, np.ndarray)
        assert row.condition.tolist() == features[index]
    labelled = rows_of(job(path, image={"columns": {"codes": "codes", "label": "label"}}))
    assert [each if isinstance(each, str) else each.condition for each in labelled] == [3, 999, "invalid_condition"]


@pytest.mark.parametrize("codes", [["a", "b"], [0.5, 1.0], None])
def test_codes_that_are_not_integers_are_missing(codes: Any, tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", {"id": ["a"], "codes": pa.array([codes]), "label": [1]})  # type: ignore[dict-item]
    (row,) = rows_of(job(path, image={"columns": {"codes": "codes", "label": "label"}}))
    assert isinstance(row, TrainingRow)
    assert row.codes is None


def test_what_is_held_out_follows_from_ids_and_is_as_much_as_was_asked_for(tmp_path: Path) -> None:
    ids = [f"image-{number}" for number in range(4000)]
    few, many = (
        [
            each
            for each in ids
            if is_held_out(job(tmp_path, answer_column="a", training={"held_out_share": share}), each)
        ]
        for share in (0.05, 0.3)
    )
    assert len(few) / 4000 == pytest.approx(0.05, abs=0.01)
    assert len(many) / 4000 == pytest.approx(0.3, abs=0.02)
    assert set(few) < set(many)


def test_answers_to_videos_are_not_asked_of_their_clips(tmp_path: Path) -> None:
    source = {"kind": "webdataset", "path": str(tmp_path), "video": {"clip_s": 2.0}}
    with pytest.raises(ConfigError, match=r"source\.video\.clip_s"):
        job(tmp_path, answer_column="a", source=source)


@pytest.mark.parametrize(("image", "kept"), [(None, 2), ({"columns": {"codes": "codes", "label": "label"}}, 1)])
def test_the_best_weights_are_those_of_the_best_first_choice_and_for_images_of_the_best_three(
    image: dict[str, Any] | None, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluations = iter([(0.5, 0.9), (0.6, 0.8), (0.4, 0.7)])

    def accuracy(*_: Any) -> dict[str, float]:
        return dict(zip(("top1_accuracy", "top3_accuracy"), next(evaluations), strict=True))

    monkeypatch.setattr(run, "accuracy", accuracy)
    prompt = {} if image else {"prompt": "say {q}", "answer_column": "a"}
    made = job(tmp_path / "rows.parquet", **prompt, image=image)
    trainer = SimpleNamespace(step=0, weights=lambda: trainer.step)
    fields = {"job": made, "trainer": trainer, "_best": None, "_history": [], "_log": lambda line: None}
    state: Any = SimpleNamespace(**fields, learner=MagicMock(), _feed=MagicMock())
    for trainer.step in (1, 2, 3):
        run.TrainingRun._measure(state)
    assert state._best["weights"] == state._best["step"] == kept


@pytest.mark.parametrize(("kind", "is_affected"), [("parquet", False), ("csv", True)])
def test_a_run_of_an_older_version_resumes_by_its_own_rules(kind: str, is_affected: bool, tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", {"id": ["a", "b"], "q": ["x", "y"], "a": ["1", "2"]})
    if kind == "csv":
        path = tmp_path / "rows.csv"
        path.write_text("id,q,a\n1,x,1\n2,y,2\n")
    source = {"kind": kind, "path": str(path), "id_column": "id"}
    output = {"path": str(tmp_path / "head")}

    def claim(**rules: Any) -> None:
        started = job(path, source=source | rules, prompt="{q}", answer_column="a", output=output)
        claim_output(started, open_inputs(started), "t0")

    claim()
    record_file = tmp_path / "head/_job/run.json"
    record = json.loads(record_file.read_text())
    recorded = record["config"]["source"]
    record["config"]["source"] = {name: value for name, value in recorded.items() if name not in OLDER}
    del record["config"]["source"]["video"]["square_pixels"]
    record["config"]["source"]["delimiter"] = None
    record_file.write_text(json.dumps(record))
    if is_affected:
        with pytest.raises(ConfigError, match=r"begun otherwise: source\.integral_ids changed"):
            claim()
    claim(**({"integral_ids": False} if is_affected else {}))
