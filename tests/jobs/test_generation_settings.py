"""Whole jobs whose target asks for logits processors in its settings: plans, records, resume, verification."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml

from actors.loading import pair
from configs.load import load_job
from configs.schema import CaptionJobConfig
from jobs import caption, verify
from pipeline.output.recorded_job import read_job
from pipeline.verify.second import Settings, second_config
from zoo.text import held_out_questions
from zoo.world import listing

ZOO = Path(__file__).resolve().parents[2] / "zoo/checkpoints"
ASKED = {"repetition_penalty": 2.5, "no_repeat_ngram_size": 2, "min_new_tokens": 12, "temperature": 0.6}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(ZOO / "text_target", tmp_path / "target"))
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | ASKED))
    return folder


@pytest.fixture
def command(target: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "src").mkdir()
    prompts = [listing.write_prompt(*asked) for asked in held_out_questions(6, 5)]
    (tmp_path / "src/a.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    sections = {
        "source": {"kind": "text", "path": f"{tmp_path}/src"},
        "prompt": "{text}",
        "model": {
            "target": {"path": str(target), "dtype": "float32"},
            "drafter": {"path": f"{ZOO}/text_drafter", "dtype": "float32"},
        },
        "method": "sd_chain_text",
        "sampling": {"max_new_tokens": 24},
        "pool": {"slots": 4, "max_context_tokens": 256},
        "sink": {"path": f"{tmp_path}/out", "keep_tokens": True},
        "job": {"progress": False},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(sections))
    return ["--config", f"{tmp_path}/job.yaml"]


def test_a_dry_run_shows_what_the_target_asks_for(
    command: list[str], no_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert caption.main([*command, "--dry-run", "sampling.min_new_tokens=0"]) == caption.DONE
    lines = capsys.readouterr().out.splitlines()
    asked = "min_new_tokens 12, temperature 0.6, repetition_penalty 2.5, no_repeat_ngram_size 2"
    assert f"settings the target asks for {asked}" in lines
    assert (
        "used     repetition_penalty 2.5, no_repeat_ngram_size 2; not min_new_tokens (sampling.min_new_tokens is set); "
        "not temperature (sampling.from_checkpoint is false)"
    ) in lines
    assert caption.main([*command, "--dry-run", f"model.target.path={ZOO}/text_target"]) == caption.DONE
    assert "settings" not in capsys.readouterr().out


def test_what_is_not_built_is_refused_before_ray(
    command: list[str], target: Path, no_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps(settings | {"num_beams": 4}))
    assert caption.main(command) == caption.REFUSED
    assert "refused: model.target: " in (message := capsys.readouterr().err)
    assert "num_beams 4 (beam search), which is not built; to decode without, set sampling.ignored_settings" in message
    assert caption.main([*command, "--dry-run", "sampling.ignored_settings=[num_beams]"]) == caption.DONE


@torch.inference_mode()
def generated(target: Path, config: CaptionJobConfig, rows: list[str]) -> list[list[int]]:
    """Tokens by `generate`, which reads the settings of the checkpoint."""
    info, model = pair.check(config), transformers.AutoModelForCausalLM.from_pretrained(target)
    outputs = []
    for row in rows:
        prompt = info.render([{"role": "user", "content": [{"type": "text", "text": row}]}])
        inputs = info.front_end.encode(prompt, ())
        out = model.generate(**inputs, max_new_tokens=24, do_sample=False)  # type: ignore[attr-defined]
        outputs.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    return outputs


@pytest.mark.slow
def test_a_job_follows_records_and_verifies_them(
    command: list[str], target: Path, tmp_path: Path, local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert caption.main(command) == caption.DONE
    table = pq.read_table(tmp_path / "out/data").sort_by("row_index")
    config = load_job(CaptionJobConfig, command[1])
    rows = (tmp_path / "src/a.txt").read_text().splitlines()
    assert table["token_ids"].to_pylist() == generated(target, config, rows)
    assert table["token_ids"].to_pylist() != generated(ZOO / "text_target", config, rows)

    recorded = yaml.safe_load((tmp_path / "out/_job/config.yaml").read_text())["sampling"]
    assert {name: recorded[name] for name in ASKED} == ASKED | {"temperature": 0.0}
    assert verify.main([str(tmp_path / "out"), "--share", "1"]) == verify.EQUAL
    capsys.readouterr()
    assert caption.main([*command, "sampling.repetition_penalty=1", "sampling.min_new_tokens=0"]) == caption.REFUSED
    message = capsys.readouterr().err
    assert "sampling.repetition_penalty: 2.5 then, 1.0 now" in message
    assert "sampling.min_new_tokens: 12 then, absent now" in message

    # The record of an output that an older version has begun, which did not follow them.
    attempt = tmp_path / "out/_job/attempts"
    [file] = attempt.iterdir()
    record = json.loads(file.read_text())
    first = ("max_new_tokens", "temperature", "top_k", "top_p", "stop", "ignore_eos")
    sampling = {name: record["config"]["sampling"][name] for name in first} | {"repetition_penalty": 1.0}
    record["config"]["sampling"] = record["content"]["sampling"] = sampling
    file.write_text(json.dumps(record))
    shutil.rmtree(tmp_path / "out/_job/digests")
    old = second_config(read_job(f"{tmp_path}/out", "OUTPUT"), Settings(f"{tmp_path}/out", 1.0))
    assert pair.check(old).generation.sampling is None
    assert old.sampling.no_repeat_ngram_size == 0
    assert caption.main(command) == caption.REFUSED
    message = capsys.readouterr().err
    assert "sampling.repetition_penalty: 1.0 then, 2.5 now" in message
    assert "sampling.no_repeat_ngram_size: absent then, 2 now" in message
    off = ["sampling.repetition_penalty=1", "sampling.min_new_tokens=0", "sampling.no_repeat_ngram_size=0"]
    assert caption.main([*command, *off]) == caption.DONE
    assert "nothing is missing" in capsys.readouterr().out
    other = second_config(
        read_job(f"{tmp_path}/out", "OUTPUT"), Settings(f"{tmp_path}/out", 1.0, against=Path(command[1]))
    )
    assert pair.check(other).generation.sampling is not None, "another job file follows its target"
