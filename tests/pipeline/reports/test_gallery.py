"""The gallery shows rows of all files, audited rows beside their plain text, and errors, and reads a bounded part."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.reports import gallery
from pipeline.reports.gallery import MAX_FILES, choose_rows, make_gallery
from pipeline.reports.live import BatchDigest
from pipeline.reports.summary import Summary
from pipeline.rows.schemas import result_schema
from pipeline.storage.output_dir import OutputDir
from tests.pipeline.reports.synthetic_job import result_row

SCHEMA = result_schema(audit=True)


def rows_of(numbers: Sequence[int], audited: Sequence[int] = (), error: str = "") -> list[dict[str, Any]]:
    nothing = {"audit_text": "", "audit_token_ids": [], "audit_loss": None}
    return [
        result_row(number, 0.7, random.Random(number), "photos/a.parquet", error)
        | nothing
        | ({"audit_text": f" plain {number}", "audit_loss": 0.25} if number in audited else {})
        for number in numbers
    ]


def output_of(path: Path, files: Sequence[list[dict[str, Any]]], folder: str = "data") -> OutputDir:
    (path / folder).mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(files):
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path / folder / f"part-{number:05d}.parquet")
    return OutputDir(str(path))


def numbers(rows: Sequence[Any]) -> list[int]:
    return [row["row_index"] for row in rows]


def test_half_of_the_rows_are_audited_if_there_are_so_many(tmp_path: Path) -> None:
    audited = (70, 71, 90, 130, 131, 140)
    output = output_of(tmp_path, [rows_of(range(200), audited)])
    assert numbers(choose_rows(output, 8, 0)) == [0, 1, 2, 3, 70, 71, 90, 130]
    assert numbers(choose_rows(output, 1, 0)) == [70]
    assert numbers(choose_rows(output, 20, 0)) == [*range(14), *audited]
    without = output_of(tmp_path / "without", [rows_of(range(200))])
    assert numbers(choose_rows(without, 8, 0)) == list(range(8))


def test_audited_rows_are_searched_in_a_bounded_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "MAX_SCANNED_ROWS", 128)
    output = output_of(tmp_path, [rows_of(range(300), (127, 128))])
    assert numbers(choose_rows(output, 4, 0)) == [0, 1, 2, 127], "row 128 is beyond the bound"


def test_rows_are_taken_from_files_spread_over_the_output_and_errors_beside_them(tmp_path: Path) -> None:
    files = [rows_of(range(100 * file, 100 * file + 30)) for file in range(2 * MAX_FILES)]
    output = output_of(tmp_path, files)
    output_of(tmp_path, [rows_of(range(5000, 5040), error="broken_image")], "errors")
    chosen = choose_rows(output, 2 * MAX_FILES + 4, 4)
    assert {number // 100 for number in numbers(chosen)} == {*range(0, 2 * MAX_FILES, 2), 50}
    assert numbers(chosen)[-4:] == [5000, 5001, 5002, 5003]
    assert numbers(chosen) == sorted(numbers(chosen))


def test_an_audited_row_has_two_texts_and_its_loss_and_another_row_has_one() -> None:
    [audited, other] = make_gallery(rows_of((3, 4), audited=(3,))).items
    assert [label for label, _ in audited.texts] == ["eagle+chain+exact", "plain"]
    assert audited.texts[1] == ("plain", "plain 3")
    assert "loss 0.25" in audited.facts
    assert [label for label, _ in other.texts] == [""]


def test_a_batch_with_an_audited_row_reports_it() -> None:
    table = pa.Table.from_pylist(rows_of(range(10), audited=(7,)), schema=SCHEMA)
    samples = BatchDigest.of(table, Summary("j", "m", "lossy", 1.0)).samples
    assert numbers_of_ids(samples) == [0, 5, 7]


def test_a_batch_without_rows_reports_none() -> None:
    digest = BatchDigest.of(SCHEMA.empty_table(), Summary("j", "m", "lossy", 1.0))
    assert (digest.samples, digest.errors, digest.summary.num_samples) == ((), {}, 0)


def numbers_of_ids(rows: Sequence[Any]) -> list[int]:
    return [int(row["sample_id"].rpartition("#")[2]) for row in rows]
