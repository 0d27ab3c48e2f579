"""Damaged and hostile inputs through whole jobs: every id accounted for, no crash, no hang, memory bounded.

Everything but the pair is real, and one video ends the process that decodes it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.rows.schemas import ERROR_CODES
from tests.jobs.stand_ins import Noted, decode_mortally, run_fake
from tests.pipeline import corpus

MAX_PROCESS_BYTES = 1 << 30
"""Of any process that reads or decodes; without bounds, several of these inputs take it beyond."""
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


def run(folder: Path, source: dict[str, Any], prompt: str = "What?") -> dict[str, str]:
    """Run a job whose pair is a fake; the code of every row by id (empty for none), each id seen once."""
    peaks = folder / "peaks"
    peaks.mkdir()

    def noted(datasource: Any, decode: Any) -> Any:
        return Noted(datasource, peaks), partial(decode_mortally, decode=decode, peaks=peaks)

    run_fake(source, str(folder / "out"), prompt, noted)
    assert max(int(path.read_text()) for path in peaks.iterdir()) < MAX_PROCESS_BYTES
    return outcomes(folder / "out")


def outcomes(output: Path) -> dict[str, str]:
    """The code of every row by id, after checking that none occurs twice and that each is in the right folder."""
    id_codes: list[tuple[str, str]] = []
    for side in ("data", "errors"):
        for path in sorted((output / side).glob("*.parquet")):
            for row in pq.read_table(path, columns=["sample_id", "error_type", "error_message"]).to_pylist():
                assert bool(row["error_type"]) == bool(row["error_message"]) == (side == "errors"), row["sample_id"]
                assert len(row["error_message"]) <= 500, row["sample_id"]
                id_codes.append((row["sample_id"], row["error_type"]))
    codes = dict(id_codes)
    assert len(codes) == len(id_codes), "an id is there twice"
    assert set(codes.values()) <= {"", *ERROR_CODES}
    return codes


def unexpected(codes: dict[str, str], expected: dict[str, frozenset[str]]) -> dict[str, str | None]:
    """Ids that are missing (None) or ended with another code than they may."""
    return {name: codes.get(name) for name, allowed in expected.items() if codes.get(name) not in allowed}


def test_there_are_many_hostile_inputs_of_every_sort() -> None:
    sorts = corpus.all_cases()
    assert {name: len(cases) for name, cases in sorts.items() if len(cases) < 10} == {}
    assert sum(map(len, sorts.values())) >= 300


def test_hostile_images_uris_prompts_ids_and_parquet_files_are_error_rows(tmp_path: Path) -> None:
    expected = corpus.write_rows(tmp_path / "in")
    codes = run(tmp_path, corpus.rows_source(tmp_path / "in"), "{ask}")
    assert unexpected(codes, expected) == {}
    others = {name: code for name, code in codes.items() if name not in expected}
    damaged = {name.partition(".parquet")[0] for name in others if ".parquet" in name}
    assert damaged <= {f"damaged {name}" for name in corpus.damaged_parquets()}
    whole = {f"p{number}" for number in range(40)}
    assert {name for name in others if ".parquet" not in name} <= whole
    assert sum(code == "broken_shard" for code in others.values()) >= len(corpus.damaged_parquets()) // 2


def test_damaged_archives_are_error_rows(tmp_path: Path) -> None:
    num_archives = corpus.write_tars(tmp_path / "in")
    codes = run(tmp_path, {"kind": "webdataset", "path": str(tmp_path / "in")})
    assert [codes[f"whole.tar#{row}"] for row in range(3)] == ["", "", ""]
    without_samples = {"cut to 0.tar", "cut to 100.tar"}
    assert num_archives - len({name.rpartition("#")[0] for name in codes}) <= len(without_samples)
    assert {codes[name] for name in codes if name.startswith(("a link", "a hard link", "a device", "a pipe"))} <= {
        "broken_sample",
        "broken_shard",
    }
    assert codes["names that climb.tar#0"] == ""  # names are only names


def test_damaged_lines_are_error_rows(tmp_path: Path) -> None:
    num_rows = corpus.write_lines(tmp_path / "in")
    codes = run(tmp_path, {"kind": "jsonl", "path": str(tmp_path / "in"), "span_max_rows": 10}, "{ask}")
    sound = {f"lines.jsonl#{row}": corpus.OK for row in range(0, num_rows, 2)}
    assert unexpected(codes, sound) == {}
    assert sum(name.startswith("lines.jsonl#") for name in codes) == num_rows
    assert {codes[f"{name}#0"] for name in ("cut.jsonl.gz", "packed.jsonl.gz", "noise.jsonl.zst")} != {""}


def test_damaged_videos_are_error_rows_also_if_one_ends_the_decoding_process(tmp_path: Path) -> None:
    expected = corpus.write_videos(tmp_path / "in")
    source = {"kind": "videos", "path": str(tmp_path / "in"), "video": {"num_frames": 4, "worker_max_bytes": 512 << 20}}
    codes = run(tmp_path, source)
    assert unexpected(codes, expected) == {}
    assert set(codes) == set(expected)
    assert [name for name, code in codes.items() if code == "decoder_died"] == ["mortal.mp4#0"]
