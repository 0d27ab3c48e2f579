"""The benchmark of decoding in a process of its own: both ways decode the same, and the results are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import isolation


def test_both_ways_decode_the_same_and_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "NUM_ROUNDS": 1,
        "NUM_IMAGES": 3,
        "NUM_ROWS": 30,
        "ROW_BYTES": 1000,
        "ROWS_PER_GROUP": 7,
    }.items():
        monkeypatch.setattr(isolation, name, value)
    monkeypatch.setattr(isolation, "RESULTS", tmp_path / "isolation.json")
    assert isolation.main() == 0
    cells = json.loads((tmp_path / "isolation.json").read_text())["cells"]
    assert {name: cell["equal"] for name, cell in cells.items()} == {"images": True, "parquet": True}
    assert all(cell[f"{way}_mb_per_s"] > 0 for cell in cells.values() for way in ("here", "child"))
