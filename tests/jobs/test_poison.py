"""Tests rows that end processes under Ray: they become error rows, the job ends, and all other rows are correct."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.exceptions import RayError

from actors.results import Stamp
from actors.serving.crash_ledger import ErrorBudgetSpent
from pipeline.rows.schemas import result_schema
from pipeline.run.crash_ledger import CrashLedgerClient, open_ledger
from pipeline.run.execution import job_error
from pipeline.run.graph import CaptionStages, RunContext, caption_dataset
from tests.actors.fakes import fake_job, num_steps_of
from tests.jobs.poison import LoadPoisoned, decode_or_die
from tests.jobs.stand_ins import RowsInMemory

STAMP = Stamp("job-1", 1, "f00d")
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


def rows_of(num_rows: int, words: dict[int, str]) -> list[dict[str, Any]]:
    return [
        {"id": f"s{index:03}", "row_index": index, "grey": index, "text": f"{words.get(index, 'ask')} {index}"}
        for index in range(num_rows)
    ]


def run(rows: list[dict[str, Any]], folder: Path, ledger: CrashLedgerClient, **pool: Any) -> list[dict[str, Any]]:
    job = fake_job(pool={"slots": 4, "batch_rows": 8, **pool})
    spans = [rows[start : start + 20] for start in range(0, len(rows), 20)]
    decode = functools.partial(decode_or_die, folder=folder)
    dataset = caption_dataset(
        job,
        RowsInMemory(spans),
        len(spans),
        CaptionStages(decode, result_schema(), LoadPoisoned(folder)),
        RunContext(STAMP, ledger=ledger),
    )
    blocks = ray.get([ref for bundle in dataset.iter_internal_ref_bundles() for ref in bundle.block_refs])
    assert all(block["sample_id"].to_pylist() == sorted(block["sample_id"].to_pylist()) for block in blocks)
    sorted_rows: list[dict[str, Any]] = pa.concat_tables(blocks).sort_by("sample_id").to_pylist()
    return sorted_rows


def deaths_of(folder: Path, sample_id: str) -> int:
    return len(list(folder.glob(f"{sample_id}-*")))


def test_rows_that_end_processes_are_given_up_and_no_other_row_is_touched(tmp_path: Path) -> None:
    """One at admission, one in mid-generation, one in decoding, beside 53 healthy rows in two actors."""
    assert num_steps_of("s019") > 1, "it must die in mid-generation"
    words = {5: "POISON", 19: "LATE", 33: "SEGFAULT"}
    with open_ledger() as ledger:
        rows = run(rows_of(56, words), tmp_path, ledger, min_size=2, max_size=2)
    assert [row["sample_id"] for row in rows] == [f"s{index:03}" for index in range(56)]
    codes = {row["sample_id"]: row["error_type"] for row in rows if row["error_type"]}
    assert codes == {"s005": "engine_died", "s019": "engine_died", "s033": "decoder_died"}
    texts = [(row["row_index"], row["generated_text"], row["status"]) for row in rows if not row["error_type"]]
    assert texts == [
        (index, f"user: <image> ask {index} / [{18 * index}]", "success") for index in range(56) if index not in words
    ]
    assert {sample_id: deaths_of(tmp_path, sample_id) <= 3 for sample_id in codes} == dict.fromkeys(codes, True)
    assert deaths_of(tmp_path, "s033") == 3


def test_too_many_failed_rows_end_the_job_with_their_codes(tmp_path: Path) -> None:
    rows = [{**row, "error": "broken_image" if index % 2 else ""} for index, row in enumerate(rows_of(64, {}))]
    result = r"of \d+ rows failed \(50.0 %\).*: \d+ broken_image"
    with open_ledger(0.25, min_rows=16) as ledger, pytest.raises(ErrorBudgetSpent, match=result), job_error(ledger):
        run(rows, tmp_path, ledger)
    with open_ledger(max_error_share=0.5, min_rows=16) as ledger:
        assert len(run(rows, tmp_path, ledger)) == 64


def test_other_errors_that_end_a_job_keep_their_type(tmp_path: Path) -> None:
    with open_ledger(max_error_share=0.0) as ledger, pytest.raises(RayError), job_error(ledger):
        ray.get(ray.remote(lambda: 1 // 0).remote())
