"""Two hundred mutated files of all formats; `make fuzz` reads ten thousand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.media.video import clips
from pipeline.rows import schemas
from tests.fuzz import __main__ as fuzz
from tests.fuzz import reader, valid

pytestmark = pytest.mark.slow


def test_mutated_files_are_rows_with_content_or_known_codes_and_their_neighbours_do_not_change(tmp_path: Path) -> None:
    results = fuzz.run(200, saved=tmp_path)
    assert results["faults"] == []
    assert results["codes"].keys() == {one.name for one in valid.files()}


def test_the_10_000_recorded_files_are_of_every_format_and_have_no_faults() -> None:
    results = json.loads(fuzz.RESULTS.read_text())
    assert (results["num_files"], results["first"], results["faults"]) == (10_000, 0, [])
    assert results["codes"].keys() == {one.name for one in valid.files()}
    codes = {code for counts in results["codes"].values() for code in counts}
    assert codes <= {*schemas.ERROR_CODES, "read", "refused"}
    assert len(codes) > 15


def test_a_file_that_ends_the_reader_is_saved_and_named_and_the_next_ones_are_read(tmp_path: Path) -> None:
    results = fuzz.run(3, first=7, saved=tmp_path, module="tests.fuzz.dying_reader")
    [fault] = results["faults"]
    assert (fault["seed"], fault["faults"]) == (8, ["the reading process ended with code 11"])
    mutated, data = reader.mutation_of(8)
    assert (tmp_path / f"8.{mutated.suffix}").read_bytes() == data
    assert results["codes"]["jpeg"] == {"read": 2}


SUMMARY = reader.summary
FAULTS: dict[str, tuple[str, Callable[..., object] | int, str]] = {
    "rows of other files change": ("summary", lambda row: SUMMARY(row) | {"digest": ""}, "other files have changed"),
    "a row is lost": ("neighbours", lambda rows: NEIGHBOURS(rows)[:1], "rows of other files have changed"),
    "an unknown code": ("summary", lambda row: SUMMARY(row) | {"error_type": row["error_type"] and "odd"}, "'odd'"),
    "a second row": ("summary", lambda row: SUMMARY(row) | {"source": "b.jpg"}, "has 3 rows"),
    "no message": ("summary", lambda row: SUMMARY(row) | {"error_message": ""}, "a message of 0 characters"),
    "memory": ("READER_BYTES", -1, "memory beyond the bound"),
}
NEIGHBOURS = reader.neighbours


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next(seed for seed in range(0, 10_000, len(valid.files())) if _is_an_error(seed, tmp_path))
    name, replacement, message = FAULTS[fault]
    monkeypatch.setattr(reader, name, replacement)
    assert message in " ".join(reader.try_file(seed, tmp_path)["faults"])
    clips.close_worker()


def _is_an_error(seed: int, folder: Path) -> bool:
    outcome = reader.try_file(seed, folder)
    assert outcome["faults"] == []
    return outcome["codes"] != ["read"]
