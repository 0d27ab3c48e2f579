"""A sample of several rows is done when all of them are there; results win over errors, row-wise over errors of the
whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.manifest.done_bitmap import PathIndex
from pipeline.output.accounts import Accounts, locate

COUNTS = np.array([2, 3], np.int64)
PATHS = PathIndex(pa.chunked_array([pa.array(["a", "b"])]))


def table(rows: list[dict[str, Any]]) -> pa.Table:
    types = dict.fromkeys(("row_index", "attempt", "clip_index", "num_clips", "prompt_index", "num_prompts", "replica"))
    columns = {
        name: pa.array([row.get(name, 1 if name == "attempt" else None) for row in rows], pa.int32()) for name in types
    }
    named = {name: pa.array([row[name] for row in rows]) for name in ("source", "sample_id")}
    return pa.table({**named, **columns})


def enter(accounts: Accounts, good: list[dict[str, Any]] = (), bad: list[dict[str, Any]] = ()) -> list[bool]:  # type: ignore[assignment]
    results = []
    for rows, is_error in ((good, False), (bad, True)):
        if rows:
            [repeated] = accounts.add(locate([table(list(rows))], PATHS), is_error)
            results += repeated.tolist()
    return results


def image(replica: int, **more: Any) -> dict[str, Any]:
    return {"source": "b", "row_index": 1, "sample_id": f"b#1#{replica}", "replica": replica, **more}


def clip(index: int, prompt: int, **more: Any) -> dict[str, Any]:
    position = {"clip_index": index, "num_clips": 2, "prompt_index": prompt, "num_prompts": 3}
    return {"source": "a", "row_index": 0, "sample_id": f"a#0@{index}#{prompt}", **position, **more}


def whole(attempt: int) -> dict[str, Any]:
    return {"source": "a", "row_index": 0, "sample_id": "a#0", "attempt": attempt}


def test_a_prompt_is_done_when_all_its_images_are_there_or_have_failed() -> None:
    accounts = Accounts(COUNTS, 3)
    assert enter(accounts, [image(0), image(2)]) == [False, False]
    assert len(accounts.done()) == 0
    assert accounts.present_ids() == {"b#1#0", "b#1#2"}
    assert enter(accounts, bad=[image(1), image(2)]) == [False, True]
    assert accounts.done().has(np.array([1]), np.array([1])).tolist() == [True]
    assert len(accounts.done(retry_errors=True)) == 0
    assert accounts.present_ids(retry_errors=True) == {"b#1#0", "b#1#2"}
    assert enter(accounts, [image(1)]) == [False]
    assert len(accounts.done(retry_errors=True)) == 1


def test_clips_and_prompts_make_as_many_rows_as_both_together() -> None:
    accounts = Accounts(COUNTS, None)
    every = [clip(index, prompt) for index in range(2) for prompt in range(3)]
    assert enter(accounts, every[:5]) == [False] * 5
    assert len(accounts.done()) == 0
    assert enter(accounts, every[3:]) == [True, True, False]
    assert len(accounts.done()) == 1
    assert accounts.present_ids() == frozenset()
    assert enter(accounts, every[:1]) == [True]


@pytest.mark.parametrize(("attempt", "is_done"), [(1, False), (2, True), (3, True)])
def test_an_error_of_a_whole_sample_counts_unless_a_later_attempt_made_rows(attempt: int, is_done: bool) -> None:
    accounts = Accounts(COUNTS, None)
    enter(accounts, [clip(0, 0, attempt=2)], [whole(attempt)])
    assert len(accounts.done()) == is_done
    assert accounts.present_ids() == (frozenset() if is_done else {"a#0@0#0"})


def test_an_error_of_a_whole_sample_does_not_count_if_all_rows_are_present() -> None:
    accounts = Accounts(COUNTS, None)
    every = [clip(index, prompt) for index in range(2) for prompt in range(3)]
    result = enter(accounts, every[1:], [clip(0, 0), whole(9)])
    assert result == [False] * 5 + [False, True]


def test_rows_of_unlisted_files_are_distinguished() -> None:
    [located] = locate([table([{"source": "z", "row_index": 0, "sample_id": "z"}, image(0)])], PATHS)
    assert located.files.tolist() == [-1, 1]
