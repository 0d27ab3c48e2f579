"""A caption job of the shipped target, a head trained on its output, and a caption job with that head."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from configs.load import load_job
from configs.training import TrainDrafterJobConfig
from jobs import caption
from jobs.train_drafter import DONE, REFUSED, main
from pipeline.storage.output_dir import OutputDir
from pipeline.training.inputs import open_inputs
from pipeline.training.rows import read_rows
from pipeline.training.run import TrainingRun, Worker
from tests.toys.training import teach_states
from zoo.world import sample_scenes

ROOT = Path(__file__).resolve().parents[2]
TARGET = str(ROOT / "zoo/checkpoints/caption_target")
NUM_SCENES = 20
TORN, CUT = 4, (6, 7)
"""The scene whose picture is torn, and the scenes whose answers end at 5 tokens."""
QUICK = (
    "training.num_steps=4",
    "training.batch_rows=4",
    "training.held_out_share=0.3",
    "training.held_out_rows=2",
    "acceptance.num_rows=2",
    "acceptance.max_new_tokens=16",
    "workers.torch_threads=1",
)
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


def captioned(source: Path, out: Path, *overrides: str) -> None:
    """Caption the scenes plainly, greedily, and keep the tokens."""
    job = [
        f"source.path={source}",
        f"sink.path={out}",
        f"model.target.path={TARGET}",
        "columns.max_new_tokens=limit",
        "sink.keep_tokens=true",
        "sink.rows_per_file=7",
        "sink.keep_columns=[limit]",
        "pool.slots=8",
        "job.progress=false",
        *overrides,
    ]
    assert caption.main(["--config", str(ROOT / "configs/jobs/zoo_caption_plain.yaml"), *job]) == 0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    scenes = list(enumerate(sample_scenes("test", NUM_SCENES, 11)))
    for name, some in (("a", scenes[:9]), ("b", scenes[9:])):
        rows: dict[str, list[object]] = {"id": [], "image": [], "question": [], "limit": []}
        for index, (_, image, _, prompt) in some:
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            rows["id"].append(f"s{index}")
            rows["image"].append(b"torn" if index == TORN else buffer.getvalue())
            rows["question"].append(prompt)
            rows["limit"].append(5 if index in CUT else 224)
        pq.write_table(pa.table(rows), folder / f"{name}.parquet")
    return folder


@pytest.fixture(scope="module")
def answered(source: Path, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Path:
    out = tmp_path_factory.mktemp("captions") / "out"
    captioned(source, out)
    return out


def results(out: Path) -> dict[str, dict[str, Any]]:
    rows = [row for path in sorted((out / "data").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    return {row["sample_id"]: row for row in rows}


def command(answered: Path, head: Path, *overrides: str) -> list[str]:
    config = head.parent / f"{head.name}.yaml"
    config.write_text(
        f"source: {{kind: job_output, path: {answered}}}\ntarget: {{path: {TARGET}, dtype: float32}}\n"
        f"head: {{kind: eagle3}}\noutput: {{path: {head}}}\n"
    )
    return ["--config", str(config), *QUICK, *overrides]


def test_a_head_trained_on_a_jobs_output_drafts_the_same_texts(answered: Path, source: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    assert main(command(answered, head)) == DONE
    record = json.loads((head / "training.json").read_text())
    assert record["measured"]["left_out"] == {}
    assert record["source"]["answers"]["num_rows"] == len(results(answered)) == NUM_SCENES - 1
    tree = "{kind: dynamic, top_k: 4, depth: 2, total_tokens: 12}"
    captioned(
        source,
        tmp_path / "faster",
        f"model.drafter={{path: {head}, dtype: float32}}",
        f"method={{drafter: {{kind: eagle3}}, tree: {tree}}}",
    )
    plain, faster = results(answered), results(tmp_path / "faster")
    assert plain.keys() == faster.keys()
    for own, row in faster.items():
        assert row["token_ids"] == plain[own]["token_ids"]
        assert row["generated_text"] == plain[own]["generated_text"]
        assert row["telemetry"]["num_draft_tokens"] > 0
    # The job with the head is itself an output that teaches.
    assert main(command(tmp_path / "faster", tmp_path / "next", "training.num_steps=1")) == DONE


def test_an_mtp_layer_trained_on_a_jobs_output_drafts_the_same_texts_in_a_trial_of_methods(
    answered: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    assert main(command(answered, whole, "head={kind: mtp}")) == DONE
    captioned(source, tmp_path / "dry", f"model.target.path={whole}", "method=auto", "--dry-run")
    assert f"mtp      a layer of {whole}" in capsys.readouterr().out
    captioned(source, tmp_path / "dry", "method=auto", "--dry-run")
    assert "has no layer: left out of the candidates" in capsys.readouterr().out
    plain = results(answered)
    for name in ("mtp", "auto"):
        captioned(source, tmp_path / name, f"model.target.path={whole}", f"method={name}", "pool.slots=2")
        faster = results(tmp_path / name)
        assert {own: row["token_ids"] for own, row in faster.items()} == {
            own: row["token_ids"] for own, row in plain.items()
        }
        drafted = [row for row in faster.values() if row["method"] == "mtp"]
        assert sum(row["telemetry"]["num_draft_tokens"] for row in drafted) > 0
        assert {row["drafter_id"] for row in faster.values()} == {""}


def test_training_samples_are_the_texts_that_the_target_generated(answered: Path, tmp_path: Path) -> None:
    """Every taught sample is the prompt and the tokens of its row, and the target's own choice at every token."""
    head, job = tmp_path / "head", command(answered, tmp_path / "head")
    assert main([*job, "training.num_steps=1"]) == DONE
    rows = results(answered)
    (head / "training.json").unlink()
    made = load_job(TrainDrafterJobConfig, job[1], (*job[2:], "training.num_steps=1"))
    output = OutputDir(str(head))
    run = TrainingRun(made, output, Worker())
    inputs = open_inputs(made).resumed(output)
    spans, options = inputs.spans(), inputs.decode_options(run.learner.special_tokens)
    seen: dict[str, bool] = {}
    target = run.learner.target
    for number in range(spans.num_spans):
        for row in read_rows(spans.read(number), made, options, None):
            assert not isinstance(row, str)
            sample = run.learner.training_samples.training_sample(row, 0)
            told, tokens = rows[row.sample_id], rows[row.sample_id]["token_ids"]
            num_prompt = told["num_input_tokens"]
            assert sample.prefix.token_ids.tolist()[num_prompt:] == tokens
            assert sample.wanted.tolist() == [False] * num_prompt + [True] * len(tokens)
            states = teach_states(target, [sample])
            chosen = target.head(states.hidden[0, num_prompt - 1 : -1]).argmax(dim=-1).tolist()
            assert chosen == tokens, row.sample_id
            assert (tokens[-1] in target.eos_ids) == (told["finish_reason"] == "stop")
            seen[row.sample_id] = told["finish_reason"] == "stop"
    assert seen.keys() == rows.keys() == {f"s{index}" for index in range(NUM_SCENES) if index != TORN}
    assert {own for own, stopped in seen.items() if not stopped} >= {f"s{index}" for index in CUT}
    assert sum(seen.values()) >= 10


def test_a_copy_of_the_target_and_another_target_are_refused(
    answered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = str(ROOT / "zoo/checkpoints/caption_drafter")
    assert main(command(answered, tmp_path / "head", f"target.path={drafter}")) == REFUSED
    refusal = capsys.readouterr().err
    assert f"target: {drafter} is another target than {TARGET}" in refusal
    assert not (tmp_path / "head").exists()
    assert (
        main(command(answered, tmp_path / "head", "target.path=zoo/checkpoints/../checkpoints/caption_target")) == DONE
    )


def test_two_workers_read_the_same_answers(answered: Path, tmp_path: Path) -> None:
    """The last batch of an epoch of 14 rows has one row, so one worker has none."""
    batch = "training.batch_rows=13"
    assert main(command(answered, tmp_path / "one", batch)) == DONE
    assert main(command(answered, tmp_path / "two", batch, "workers.count=2")) == DONE
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-3, atol=1e-4)
