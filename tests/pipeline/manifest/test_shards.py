"""The shards of a manifest contain every sample once, in ranges of about equal size."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import ConfigError
from pipeline.manifest import spans
from pipeline.manifest.done_bitmap import UNKNOWN
from pipeline.manifest.manifest import SCHEMA
from pipeline.manifest.shards import Cut, cut, plan_shard, rows_of
from pipeline.storage.shard import MAX_SHARDS, Shard

COUNTS = st.lists(st.one_of(st.integers(0, 12), st.just(UNKNOWN)), min_size=1, max_size=12)


def files_of(counts: list[int], groups: int) -> pa.Table:
    rows = []
    for number, count in enumerate(counts):
        parts = [count // groups] * groups if count > 0 and count % groups == 0 else []
        rows.append(
            {
                "path": f"{number:03d}",
                "size_bytes": 10 * max(count, 1),
                "token": "",
                "num_samples": None if count == UNKNOWN else count,
                "row_group_rows": parts,
                "row_group_bytes": [10] * len(parts),
                "repeated_rows": [],
            }
        )
    return pa.Table.from_pylist(rows, SCHEMA)


def samples_of(pieces: list[spans.Piece], counts: list[int]) -> list[tuple[int, int]]:
    samples = []
    for file, start, stop in pieces:
        end = stop if stop is not None else counts[file] if counts[file] != UNKNOWN else start + 1
        samples += [(file, row) for row in range(start, end)]
    return samples


@given(COUNTS, st.integers(2, 6), st.integers(1, 9), st.integers(1, 3), st.integers(0, 12))
def test_shards_contain_every_sample_once(counts, num_shards, max_rows, groups, num_in_first_part) -> None:
    files = files_of(counts, groups)
    planned = spans.plan(files, max_rows, 1 << 30)
    numbers, sizes, first = np.array(counts), files["size_bytes"].to_numpy(), min(num_in_first_part, len(counts))
    # The manifest grew: it has two parts.
    cuts = tuple(
        cut(numbers[low:high], sizes[low:high], low, num_shards)
        for low, high in ((0, first), (first, len(counts)))
        if high > low
    )
    everything = Counter(samples_of([piece for span in planned for piece in span], counts))
    num_times: Counter[tuple[int, int]] = Counter()
    for number in range(num_shards):
        mine = samples_of(
            [piece for span in plan_shard(files, cuts, number, max_rows, 1 << 30) for piece in span], counts
        )
        num_times.update(mine)
        for file in range(len(counts)):
            start, stop = rows_of(cuts, number, file)
            own = {row for at, row in mine if at == file}
            end = (counts[file] if counts[file] != UNKNOWN else 1) if stop is None else stop
            assert own == set(range(start, end)), "rows_of and plan_shard agree"
    assert num_times == everything


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30).filter(any), st.integers(2, 8))
def test_shards_of_known_counts_have_equal_numbers_of_samples(counts, num_shards) -> None:
    made = cut(np.array(counts), np.ones(len(counts), np.int64), 0, num_shards)
    ends = np.cumsum([0, *counts])
    positions = [int(ends[bound.file]) + bound.row for bound in made.bounds]
    sizes = np.diff(positions)
    assert sizes.sum() == sum(counts)
    assert sizes.max() - sizes.min() <= 1
    assert Cut.from_json(made.to_json()) == made


def test_shards_of_unknown_counts_have_about_equal_bytes() -> None:
    made = cut(np.full(100, UNKNOWN), np.full(100, 7), 20, 4)
    assert [bound.file for bound in made.bounds] == [20, 45, 70, 95, 120]


@pytest.mark.parametrize("text", ["", "1", "1/1/2", "4/4", "-1/4", "0/0", f"0/{MAX_SHARDS + 1}", "a/b", "0 / 4"])
def test_a_shard_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--shard .*must be I/N"):
        Shard.parse(text)


def test_the_last_shard_is_parsed() -> None:
    assert Shard.parse(f"{MAX_SHARDS - 1}/{MAX_SHARDS}") == (MAX_SHARDS - 1, MAX_SHARDS)
