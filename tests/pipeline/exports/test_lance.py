"""Captions become one column of a Lance dataset, by id, and no other column changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest

from configs.load import ConfigError
from pipeline.run.job_plan import ResumeOptions
from tests.pipeline.attempts import job, run
from tests.pipeline.exports.small_jobs import RED, export
from tests.pipeline.formats.shards import write_parquet

IDS = [30, 10, 20, 40]


def made(tmp_path: Path, ids: list[int] = IDS) -> tuple[object, Path]:
    """A job whose ids are those of a Lance dataset with other rows as well."""
    lance = pytest.importorskip("lance")
    write_parquet(tmp_path / "in/a.parquet", {"own": ids, "i": [RED] * len(ids)})
    source = {"kind": "parquet", "path": str(tmp_path / "in"), "columns": {"image": "i"}, "id_column": "own"}
    path = tmp_path / "d.lance"
    lance.write_dataset(pa.table({"own": list(range(10, 60, 10)), "v": list("abcde")}), str(path), max_rows_per_file=2)
    return job(source, tmp_path / "out", sink={"rows_per_file": 2}), path


def rows(path: Path) -> dict[int, tuple[str, str | None]]:
    import lance

    table = lance.dataset(str(path)).to_table().to_pylist()
    return {row["own"]: (row["v"], row.get("caption")) for row in table}


def test_captions_are_merged_once_in_the_order_of_the_dataset(tmp_path) -> None:
    config, dataset_path = made(tmp_path)
    run(config, fails=lambda own: own == "40")
    section = {"kind": "lance", "path": str(dataset_path)}
    [report] = export(tmp_path / "out", section)
    assert (report.num_written, report.num_refused) == (3, 0)
    texts = {10: "text of 10", 20: "text of 20", 30: "text of 30", 40: None, 50: None}
    assert rows(dataset_path) == {own: ("abcde"[own // 10 - 1], text) for own, text in texts.items()}
    assert list(rows(dataset_path)) == [10, 20, 30, 40, 50]
    assert export(tmp_path / "out", section)[0].num_parts == 0
    run(config, ResumeOptions(retry_errors=True))
    assert export(tmp_path / "out", section)[0].num_written == 4
    assert rows(dataset_path)[40] == ("d", "text of 40")


def test_a_merge_that_was_not_recorded_is_merged_again(tmp_path) -> None:
    config, dataset_path = made(tmp_path)
    run(config)
    section = {"kind": "lance", "path": str(dataset_path)}
    export(tmp_path / "out", section)
    whole = rows(dataset_path)
    for path in (tmp_path / "out").glob("_job/exports/*/done/*"):
        path.unlink()
    export(tmp_path / "out", section)
    assert rows(dataset_path) == whole


def test_ids_without_a_row_are_refused_rows(tmp_path) -> None:
    config, dataset_path = made(tmp_path, [10, 99])
    run(config)
    [report] = export(tmp_path / "out", {"kind": "lance", "path": str(dataset_path)})
    assert (report.num_written, report.num_refused) == (1, 1)
    assert report.refused == ["99: export_failed: the dataset has no row with this id"]


def test_a_column_of_the_user_is_refused_unless_it_is_to_be_replaced(tmp_path) -> None:
    config, path = made(tmp_path)
    run(config)
    section = {"kind": "lance", "path": str(path), "column": "v"}
    before = rows(path)
    with pytest.raises(ConfigError, match=r"exports\.0\.column: the dataset has a column 'v'"):
        export(tmp_path / "out", section)
    with pytest.raises(ConfigError, match=r"exports\.0\.column: the dataset has a column 'v'"):
        export(tmp_path / "out", section)
    assert rows(path) == before
    export(tmp_path / "out", {**section, "existing": "overwrite"})
    assert rows(path)[10][0] == "text of 10"


def test_jobs_without_ids_and_machines_without_the_library_are_refused(tmp_path, monkeypatch) -> None:
    write_parquet(tmp_path / "in/a.parquet", {"own": [1], "i": [RED]})
    source = {"kind": "parquet", "path": str(tmp_path / "in"), "columns": {"image": "i"}}
    run(job(source, tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"exports\.0: captions are merged by id, and the job has no source\.id_col"):
        export(tmp_path / "out", {"kind": "lance", "path": str(tmp_path / "d.lance")})
    run(job({**source, "id_column": "own"}, tmp_path / "other"))
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(ConfigError, match=r"exports\.0\.kind: 'lance' needs .* pip install pylance"):
        export(tmp_path / "other", {"kind": "lance", "path": str(tmp_path / "d.lance")})
