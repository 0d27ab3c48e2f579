"""The findings and the exit status of the output check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from configs.schema import CaptionJobConfig
from jobs import check
from tests.pipeline.attempts import job, run
from tests.pipeline.formats.shards import write_parquet


@pytest.fixture
def config(tmp_path: Path) -> CaptionJobConfig:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("".join(f"line {row}\n" for row in range(30)))
    return job({"kind": "text", "path": str(tmp_path / "in"), "span_max_rows": 8}, tmp_path / "out")


def made(config: CaptionJobConfig, num_batches: int | None = None) -> Path:
    run(config, num_batches=num_batches, fails=lambda own: own == "a.txt#7")
    output = Path(config.sink.path)
    (output / "_job/config.yaml").write_text(yaml.safe_dump(config.resolved()))
    return output


def test_an_undamaged_output_is_complete_without_problems(
    config: CaptionJobConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([str(made(config))]) == check.COMPLETE
    output = capsys.readouterr().out.splitlines()
    verified = [line for line in output if line.startswith("verified ")]
    assert len(verified) == 1
    assert re.fullmatch(r"verified \d files by SHA-256: \S+ MB in \S+ s(, \S+ MB/s)?; 0 damaged", verified[0])
    assert [line for line in output if line not in verified] == [
        "manifest  1 file, 30 samples",
        "rows      29 in data/, 1 in errors/",
        "missing   0",
        "waiting   0",
        "problems  0",
    ]


def test_missing_samples_and_unpublished_spool_files_are_named(
    config: CaptionJobConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([str(made(config, num_batches=6))]) == check.INCOMPLETE
    output = capsys.readouterr().out
    assert "missing   6\n" in output
    assert "  a.txt#24\n  a.txt#25\n" in output
    assert "_job/spool/a0001/000000-00-data.parquet: 4 rows to be published" in output


@pytest.mark.parametrize("kind", ["bytes", "torn", "foreign", "twice", "no note"])
def test_damaged_and_foreign_files_are_named(
    config: CaptionJobConfig, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = made(config) / "data"
    name = data / "part-000001.parquet"
    whole = name.read_bytes()
    if kind == "bytes":
        name.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    elif kind == "torn":
        name.write_bytes(whole[:-9])
    elif kind == "foreign":
        write_parquet(data / "mine.parquet", {"sample_id": ["a"]})
    elif kind == "twice":
        (data / "part-000009.parquet").write_bytes(whole)
    else:
        (data.parent / "_job/files/data/part-000001.parquet.json").unlink()
    assert check.main([str(data.parent)]) == check.UNSOUND
    output = capsys.readouterr().out
    expected = {
        "bytes": "data/part-000001.parquet: its bytes are not those that were written",
        "torn": "data/part-000001.parquet: it is torn",
        "foreign": "data/mine.parquet: no job has signed it",
        "twice": "ids are there more than once",
        "no note": "data/part-000001.parquet: no checksum was noted",
    }
    assert expected[kind] in output
    assert ("missing   0" in output) == (kind not in ("torn",)) or kind == "bytes"


def test_a_folder_without_a_job_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(tmp_path)]) == check.REFUSED
    assert "holds no manifest and attempts of a job" in capsys.readouterr().err
