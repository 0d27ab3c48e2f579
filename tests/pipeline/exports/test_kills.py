"""A killed export leaves no partial file, wherever it is killed, and the next one writes each caption once."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.pipeline.exports.small_jobs import (
    export,
    files_below,
    image_job,
    interrupted,
    killed,
    some_tars,
    tar_job,
)

MAX_KILLS = 400
NAMES = ["a.png", "b.png", "s/c.png", "s/d.png"]


def with_user_files(tmp_path: Path) -> Path:
    image_job(tmp_path, NAMES, rows_per_file=2)
    (tmp_path / "in/a.txt").write_text("mine")
    return tmp_path / "in"


def with_images(tmp_path: Path) -> Path:
    image_job(tmp_path, NAMES, rows_per_file=2)
    return tmp_path / "new"


def with_tars(tmp_path: Path) -> Path:
    tar_job(tmp_path, some_tars())
    return tmp_path / "new"


CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "skip": (with_user_files, {"kind": "sidecars"}),
    "overwrite": (with_user_files, {"kind": "sidecars", "existing": "overwrite"}),
    "append": (with_user_files, {"kind": "sidecars", "existing": "append"}),
    "append json": (with_images, {"kind": "sidecars", "format": "json", "existing": "append"}),
    "dataset": (with_images, {"kind": "dataset", "images": "first"}),
    "webdataset": (with_tars, {"kind": "webdataset"}),
    "openai_batch": (with_tars, {"kind": "openai_batch"}),
}


def section(case: str, folder: Path) -> dict[str, Any]:
    given = CASES[case][1]
    return given if given["kind"] == "sidecars" else {**given, "path": str(folder / "new")}


def comparable(files: dict[str, bytes]) -> dict[str, Any]:
    """Parquet files by their rows, without the configuration, which contains the folder of the test, and the time."""
    return {
        name: sorted(map(repr, pq.read_table(io.BytesIO(data)).to_pylist()))
        if name.endswith(".parquet")
        else re.sub(
            rb"configuration +[0-9a-f]+|\"created\": \d+|(batch_req_|chatcmpl-|request_id.*?)[0-9a-f]{16}", b"", data
        )
        for name, data in files.items()
    }


def try_place(case: str, folder: Path, index: int, undisturbed: dict[str, Any], before: dict[str, bytes]) -> bool:
    """Kill one export, check what is visible, finish it, and compare; return whether it was killed."""
    target = CASES[case][0](folder)
    action = partial(export, folder / "out", section(case, folder))
    was_killed = killed(action, index)
    visible = comparable(files_below(target)) if target.exists() else {}
    for name, content in visible.items():
        # The card counts the rows of a finished export, and is written last.
        assert content in (undisturbed[name], before.get(name)), f"{name} is partial after a kill at {index}"
    killed(action, index // 2 + 1)  # also the second one
    export(folder / "out", section(case, folder))
    assert comparable(files_below(target)) == undisturbed, f"after a kill at {index}"
    assert export(folder / "out", section(case, folder))[0].num_parts == 0
    return was_killed


def try_places(case: str, tmp_path: Path, indices: Callable[[int], int]) -> int:
    """Kill at increasing places until an export ends before it is killed; return the number of kills."""
    whole = tmp_path / "whole"
    target = CASES[case][0](whole)
    before = files_below(target) if target.exists() else {}
    export(whole / "out", section(case, whole))
    undisturbed = comparable(files_below(target))
    for number in range(MAX_KILLS):
        if not try_place(case, tmp_path / str(number), indices(number), undisturbed, before):
            return number
    raise AssertionError("the export never ended before it was killed")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["append", "dataset", "webdataset"])
def test_kills_at_some_file_operations_leave_each_caption_once(tmp_path, case) -> None:
    assert try_places(case, tmp_path, lambda number: 3 + 17 * number) >= 2


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_kills_at_every_file_operation_leave_each_caption_once(tmp_path, case) -> None:
    assert try_places(case, tmp_path, lambda number: number + 1) >= 30


@pytest.mark.slow_cases("append json", "overwrite", "skip")
@pytest.mark.parametrize("case", CASES)
def test_a_second_export_at_the_same_time_changes_nothing(tmp_path, case) -> None:
    """The second one runs as a whole between two changes of the first one, at several places."""
    whole = tmp_path / "whole"
    target = CASES[case][0](whole)
    export(whole / "out", section(case, whole))
    undisturbed = comparable(files_below(target))
    num_interrupted = 0
    for index in (1, 4, 9, 16, 25, 30):
        folder = tmp_path / str(index)
        target = CASES[case][0](folder)
        action = partial(export, folder / "out", section(case, folder))
        seconds: list[Any] = []
        with interrupted(index, lambda seconds=seconds, action=action: seconds.append(action())):
            action()
        assert comparable(files_below(target)) == undisturbed, f"after a second export at {index}"
        assert action()[0].num_parts == 0
        num_interrupted += len(seconds)
    assert num_interrupted == 6
