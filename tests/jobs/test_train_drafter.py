"""A head is taught from an ordinary source, measured on rows held out, and drafts in a caption job at once."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.pair import load
from configs.load import load_job
from configs.schema import CaptionJob
from decoding import Request, Sampling
from jobs.train_drafter import DONE, REFUSED, main
from zoo.world import sample_scenes

CONFIG = "configs/train_zoo_medusa.yaml"
QUICK = ("training.num_steps=4", "training.batch_rows=4", "training.held_out_rows=2")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve scenes, one picture torn and one answer missing among them."""
    rows: dict[str, list[object]] = {"id": [], "image": [], "question": [], "truth": []}
    for index, (_, image, caption, prompt) in enumerate(sample_scenes("test", 12, 3)):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        rows["id"].append(f"s{index}")
        rows["image"].append(b"torn" if index == 4 else buffer.getvalue())
        rows["question"].append(prompt)
        rows["truth"].append(None if index == 7 else caption)
    folder = tmp_path_factory.mktemp("source")
    pq.write_table(pa.table(rows), folder / "a.parquet")
    return folder


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_taught_head_drafts_in_a_caption_job_without_changing_its_text(
    kind: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    assert (
        main(["--config", CONFIG, f"source.path={source}", f"output.path={out}", f"head={{kind: {kind}}}", *QUICK])
        == DONE
    )
    assert str(out) in capsys.readouterr().out
    told = json.loads((out / "training.json").read_text())["measured"]
    assert (told["num_taught_rows"], told["num_held_out_rows"]) == (8, 2)
    assert told["left_out"] == {"not_an_image": 1, "missing_answer": 1}
    assert told["mean_acceptance_length"] >= 1.0
    assert 0 <= told["top1_accuracy"] <= told["top3_accuracy"] <= 1
    _, image, _, prompt = sample_scenes("test", 1, 9)[0]
    texts = []
    for preset in (kind if kind == "medusa" else "eagle2", "plain"):
        overrides = (f"model.drafter.path={out}",) if preset != "plain" else ()
        pair = load(load_job(CaptionJob, f"configs/zoo_{preset}.yaml", overrides))
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}
        request = Request(
            "one", pair.render([message]), (np.asarray(image.convert("RGB")),), Sampling(max_new_tokens=30)
        )
        (done,) = pair.engine(1, 256).run([request])
        texts.append(done.token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("answer_column=nothing",), "nothing"),
        (("training.held_out_rows=50",), "50 rows|52|54|need"),
        (("head.kind=other",), "head"),
        (("target.path=nowhere/at/all",), "target: nowhere/at/all"),
        (("training.num_steps=0",), "training.num_steps"),
    ],
)
def test_a_training_job_that_cannot_work_is_refused(
    overrides: tuple[str, ...], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", CONFIG, f"source.path={source}", f"output.path={tmp_path / 'head'}", *QUICK, *overrides]
    assert main(arguments) == REFUSED
    refusal = capsys.readouterr().err
    assert refusal.count("refused:") == 1
    assert any(part in refusal for part in message.split("|")), refusal


def test_a_head_is_never_written_over_another(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["--config", CONFIG, f"source.path={source}", f"output.path={tmp_path}", *QUICK]) == REFUSED
    assert "is not empty" in capsys.readouterr().err
