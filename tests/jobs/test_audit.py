"""Whole jobs with a lossy method on the shipped text pair: audited rows, the loss budget, its states over attempts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.losses import edit_distance
from actors.serving.audited import is_audited
from jobs import caption
from jobs.terminal.command import DONE, FAILED, TOO_LOSSY
from pipeline.reports.loss import loss_interval
from zoo.text import held_out_questions
from zoo.world import listing

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 64
SHARE = 0.5
BUDGET = ("audit.share=1.0", "audit.max_loss=0.2", "audit.min_rows=64", "audit.confidence=0.9", "pool.batch_rows=8")
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


def half_of_the_words(own: str, plain: str) -> float:
    """A user's metric."""
    mine, theirs = set(own.split()), set(plain.split())
    return 1.0 - len(mine & theirs) / max(len(mine | theirs), 1)


def failing(own: str, plain: str) -> float:
    raise KeyError("a user's mistake")


def out_of_range(own: str, plain: str) -> float:
    return 7.0


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    questions = [listing.write_prompt(*asked) for asked in held_out_questions(NUM_ROWS, 5)]
    pq.write_table(
        pa.table({"id": [f"q{number}" for number in range(NUM_ROWS)], "question": questions}), folder / "q.parquet"
    )
    pair = ROOT / "zoo/checkpoints"
    job = {
        "source": {"kind": "parquet", "path": str(folder), "columns": {}, "id_column": "id"},
        "prompt": "{question}",
        "model": {
            "target": {"path": str(pair / "text_target"), "dtype": "float32"},
            "drafter": {"path": str(pair / "text_drafter"), "dtype": "float32"},
        },
        "method": {
            "drafter": {"kind": "model"},
            "tree": {"kind": "chain", "length": 4},
            "acceptance": {"kind": "random", "probability": 0.6},
        },
        "sampling": {"max_new_tokens": 24},
        "pool": {"slots": 8, "max_context_tokens": 256},
        "sink": {"path": "unset", "keep_tokens": True},
        "job": {"progress": False, "seed": 3},
    }
    path = folder.parent / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def run(job_file: Path, out: Path, *overrides: str) -> int:
    return caption.main(["--config", str(job_file), f"sink.path={out}", *overrides])


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    rows = [row for path in sorted((out / "data").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert len({row["sample_id"] for row in rows}) == len(rows)
    return {row["sample_id"]: row for row in rows}


@pytest.fixture(scope="module")
def plain(job_file: Path, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("plain")
    assert run(job_file, out, "method={drafter: {kind: none}}") == DONE
    return rows_of(out)


def test_audited_rows_have_the_plain_output_and_their_loss_and_the_summary_the_interval(
    job_file: Path, plain: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(job_file, tmp_path, f"audit.share={SHARE}", "audit.metric=edit") == DONE
    rows, losses = rows_of(tmp_path), []
    assert rows.keys() == plain.keys()
    for sample_id, row in rows.items():
        theirs = plain[sample_id]
        assert row["verify_mode"] == "lossy"
        if not is_audited(SHARE, 3, sample_id):
            assert (row["audit_text"], row["audit_token_ids"], row["audit_loss"]) == ("", [], None)
            continue
        assert row["audit_token_ids"] == theirs["token_ids"]
        assert row["audit_text"] == theirs["generated_text"]
        longest = max(len(row["token_ids"]), len(theirs["token_ids"]))
        assert row["audit_loss"] == edit_distance(row["token_ids"], theirs["token_ids"]) / longest
        losses.append(row["audit_loss"])
    assert 10 < len(losses) < NUM_ROWS - 10
    assert any(losses), "the method is lossy"
    audit = json.loads((tmp_path / "_job/summary.json").read_text())["audit"]
    assert audit["num_rows"] == len(losses)
    assert audit["mean_loss"] == pytest.approx(sum(losses) / len(losses))
    assert (audit["low"], audit["high"]) == pytest.approx(loss_interval(len(losses), sum(losses), 0.95))
    assert "audited loss" in capsys.readouterr().out


def test_an_exceeded_budget_ends_the_job_also_when_it_resumes_and_a_larger_one_lets_it_finish(
    job_file: Path, plain: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(job_file, tmp_path, *BUDGET) == TOO_LOSSY == 4
    output = capsys.readouterr().err
    assert "certainly above audit.max_loss (0.2)" in output
    assert "Traceback" not in output
    # The next attempt begins with the losses of the first one's rows, in data/ and in the spool.
    assert run(job_file, tmp_path, *BUDGET) == TOO_LOSSY
    assert "certainly above" in capsys.readouterr().err
    assert run(job_file, tmp_path, *BUDGET, "audit.max_loss=0.99") == DONE
    rows = rows_of(tmp_path)
    assert rows.keys() == plain.keys()
    assert len({row["attempt"] for row in rows.values()}) > 1, "finished rows are kept"
    assert all((row["audit_loss"] > 0) == (row["token_ids"] != row["audit_token_ids"]) for row in rows.values())


def test_an_exceeded_budget_makes_the_rest_lossless(
    job_file: Path, plain: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(job_file, tmp_path, *BUDGET, "audit.on_exceeded=lossless") == DONE
    assert "the rows that are left are decoded losslessly" in capsys.readouterr().out
    rows = rows_of(tmp_path)
    assert rows.keys() == plain.keys()
    lossless = {sample_id for sample_id, row in rows.items() if row["verify_mode"] == "lossless"}
    assert 0 < len(lossless) < NUM_ROWS
    for sample_id, row in rows.items():
        if sample_id in lossless:
            assert row["token_ids"] == plain[sample_id]["token_ids"]
            assert row["method"] == "model+chain+exact"
            assert row["audit_loss"] is None
        else:
            assert row["audit_token_ids"] == plain[sample_id]["token_ids"]
    assert len({row["config_fingerprint"] for row in rows.values()}) == 1
    assert run(job_file, tmp_path, *BUDGET, "audit.on_exceeded=lossless") == DONE
    assert "nothing is missing" in capsys.readouterr().out


def test_a_users_function_measures_the_loss(job_file: Path, tmp_path: Path) -> None:
    metric = f"{__name__}:{half_of_the_words.__name__}"
    assert run(job_file, tmp_path, "audit.share=1.0", f"audit.metric={metric}", "source.span_max_rows=8") == DONE
    for row in rows_of(tmp_path).values():
        assert row["audit_loss"] == half_of_the_words(row["generated_text"], row["audit_text"])


@pytest.mark.parametrize(
    ("function", "reason"),
    [("failing", 'raised KeyError: "a user\'s mistake"'), ("out_of_range", "returned 7.0")],
)
def test_errors_of_a_users_function_end_the_job_with_the_reason(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, reason: str
) -> None:
    assert run(job_file, tmp_path, "audit.share=1.0", f"audit.metric={__name__}:{function}") == FAILED
    output = capsys.readouterr().err
    assert f"the job was ended: the metric {__name__}:{function} {reason}" in " ".join(output.split())
    assert "Traceback" not in output
