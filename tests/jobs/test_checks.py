"""Checks, retries and several captions on whole jobs of the shipped text pair: a function of a user, a kill, and
verification."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from jobs.terminal.exit_status import DONE, REFUSED
from tests.waiting import until
from zoo.text import held_out_questions
from zoo.world import listing

ROOT = Path(__file__).resolve().parents[2]
NUM_PROMPTS, NUM_CAPTIONS = 24, 2
NUM_ROWS = NUM_PROMPTS * NUM_CAPTIONS
CHECK = "import zlib\n\n\ndef odd(text: str) -> bool:\n    return zlib.crc32(text.encode()) % 2 == 1\n"
COMPARED = (
    *("sample_id", "replica", "generated_text", "token_ids", "finish_reason"),
    *("loop_start", "failed_checks", "retry_index"),
)


def job(folder: Path, **sections: Any) -> None:
    (folder / "quality.py").write_text(CHECK)
    prompts = [listing.write_prompt(*asked).replace("\n", " ") for asked in held_out_questions(NUM_PROMPTS, 5)]
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    checkpoints = f"{ROOT}/zoo/checkpoints"
    data = {
        "source": {"kind": "text", "path": "prompts.txt"},
        "prompt": "{text}",
        "model": {
            "target": {"path": f"{checkpoints}/text_target", "dtype": "float32"},
            "drafter": {"path": f"{checkpoints}/text_drafter", "dtype": "float32"},
        },
        "method": "sd_chain_text",
        "sampling": {
            **{"max_new_tokens": 24, "temperature": 0.5, "num_captions_per_prompt": NUM_CAPTIONS},
            **{"stop_loops": 2, "min_loop_tokens": 4},
        },
        "checks": {"python": "quality:odd", "min_words": 2},
        "retry": {"max_attempts": 3, "temperature": 0.8, "top_p": 0.95},
        "pool": {"slots": 4, "max_context_tokens": 256, "batch_rows": 4},
        "sink": {"path": "out", "keep_tokens": True, "max_unsaved_seconds": 0.0},
        "job": {"progress": False},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(data | sections))


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "draftfleet", *arguments], cwd=folder, env=environment, stdout=log, stderr=log
        )


def finish(folder: Path, *arguments: str) -> int:
    return start(folder, *arguments).wait(500)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("out/data/*.parquet"))
    rows = [row for path in files for row in pq.read_table(path, columns=list(COMPARED)).to_pylist()]
    return sorted(rows, key=lambda row: row["sample_id"])


def num_saved(folder: Path) -> int:
    return len([*folder.glob("out/_job/spool/**/*.parquet"), *folder.glob("out/data/*.parquet")])


@pytest.mark.slow
def test_a_killed_job_resumes_to_the_rows_of_an_undisturbed_one_and_verify_replays_them(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        job(folder)
    assert finish(whole, "caption", "job.yaml") == DONE, (whole / "log").read_text()[-3000:]
    expected = rows_of(whole)
    assert len(expected) == NUM_ROWS
    assert {row["replica"] for row in expected} == set(range(NUM_CAPTIONS))
    assert {row["retry_index"] for row in expected} == {0, 1, 2, 3}
    assert {code for row in expected for code in row["failed_checks"]} >= {"python"}
    assert len({row["generated_text"] for row in expected}) > NUM_PROMPTS
    summary = json.loads((whole / "out/_job/summary.json").read_text())
    assert summary["failed_checks"]["python"] == sum("python" in row["failed_checks"] for row in expected)
    assert (summary["num_samples"], summary["num_inputs"]) == (NUM_ROWS, NUM_PROMPTS)
    assert summary["num_retried"] == sum(row["retry_index"] > 0 for row in expected)
    assert f"{summary['num_retried']} rows have the text of a further attempt" in (whole / "log").read_text()

    driver = start(killed, "caption", "job.yaml")
    until(lambda: num_saved(killed), (killed / "log").read_text, driver)
    driver.kill()
    driver.wait()
    assert not (killed / "out/_job/summary.json").exists(), "the job ended before it was killed"
    assert finish(killed, "caption", "job.yaml", "pool.slots=3", "pool.batch_rows=7") == DONE
    assert rows_of(killed) == expected

    assert finish(whole, "verify", "out", "--share", "1") == DONE, (whole / "log").read_text()[-3000:]
    [record] = whole.glob("out/_job/verify/*/verification.json")
    findings = json.loads(record.read_text())
    assert (findings["num_equal"], findings["num_different"]) == (NUM_ROWS, 0)

    (whole / "quality.py").write_text(CHECK.replace("== 1", "== 0"))
    assert finish(whole, "verify", "out", "--share", "1") == REFUSED
    assert "checks.python: the output was made by quality:odd sha256:" in (whole / "log").read_text()


def test_a_dry_run_refuses_a_function_that_is_not_there_and_a_script_without_a_name(tmp_path: Path) -> None:
    job(tmp_path)
    for override, message in (
        ("checks.python=quality:even", "checks.python: quality:even: "),
        ("checks.scripts=[Latinish]", "checks.scripts: 'Latinish' is no script of Unicode"),
        ("sampling.temperature=0", "sampling.num_captions_per_prompt is 2, and at temperature 0 all are the same"),
    ):
        assert finish(tmp_path, "caption", "job.yaml", "--dry-run", override) == REFUSED
        log = (tmp_path / "log").read_text()
        assert message in log
        assert "Traceback" not in log
