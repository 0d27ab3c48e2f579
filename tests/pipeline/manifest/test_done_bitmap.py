"""Tests that the done bitmap, with one bit per sample, behaves like a set of pairs."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.manifest import spans
from pipeline.manifest.done_bitmap import UNKNOWN, DoneBitmap, PathIndex

COUNTS = [5, UNKNOWN, 0, 9, 1, 20]
samples = st.sampled_from([0, 1, 3, 4, 5]).flatmap(
    lambda file: st.tuples(st.just(file), st.integers(0, (COUNTS[file] if COUNTS[file] > 0 else 30) - 1))
)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([file for file, _ in pairs], np.int64), np.array([row for _, row in pairs], np.int64)


@example([[(0, 4), (3, 0), (3, 8)], [(3, 0), (3, 0)]])
@example([[(5, 7), (5, 1), (5, 7)], []])
@given(st.lists(st.lists(samples, max_size=12), max_size=6))
def test_the_done_bitmap_equals_a_set_of_pairs(batches: list[list[tuple[int, int]]]) -> None:
    bitmap, expected = DoneBitmap(np.array(COUNTS, np.int64)), set()
    for batch in batches:
        there = []
        for pair in batch:
            there.append(pair in expected)
            expected.add(pair)
        assert bitmap.add(*columns(batch)).tolist() == there
    assert len(bitmap) == len(expected)
    for file, count in enumerate(COUNTS):
        rows = list(range(30 if count == UNKNOWN else count))
        assert bitmap.has(*columns([(file, row) for row in rows])).tolist() == [(file, row) in expected for row in rows]
        for start in range(0, max(count, 0), 3):
            result = bitmap.rows(file, start, None).tolist()
            assert result == [(file, row) in expected for row in range(start, count)]
            [number] = bitmap.num_in(np.array([file]), np.array([start]), np.array([-1]))
            assert number == sum(result)
    other = DoneBitmap(bitmap.counts)
    other.merge(bitmap)
    assert len(other) == len(expected)


def test_rows_beyond_a_file_are_no_samples() -> None:
    done = DoneBitmap(np.array([3, UNKNOWN], np.int64))
    with pytest.raises(ValueError, match="beyond the end"):
        done.add(np.array([0]), np.array([3]))
    with pytest.raises(ValueError, match="beyond the end"):
        done.has(np.array([1]), np.array([-1]))


def test_a_file_of_unknown_count_is_never_complete() -> None:
    done = DoneBitmap(np.array([2, UNKNOWN], np.int64))
    done.add(np.array([0, 0, 1]), np.array([0, 1, 0]))
    assert [done.is_complete(0), done.is_complete(1)] == [True, False]


def test_a_hundred_million_samples_take_a_bit_each() -> None:
    done = DoneBitmap(np.full(100_000, 1000, np.int64))
    ordinals = np.arange(0, 100_000_000, 1009)
    done.add(ordinals // 1000, ordinals % 1000)
    assert done._bits.nbytes == 12_500_000
    assert len(done) == len(ordinals)
    assert done.num_in(np.arange(100_000), np.zeros(100_000, np.int64), np.full(100_000, -1)).sum() == len(ordinals)


def test_indices_of_paths_are_found_among_many() -> None:
    paths = pa.chunked_array([pa.array([f"{number:04}" for number in range(500)]), pa.array(["x", "y"])])
    assert PathIndex(paths).find(pa.array(["0300", "gone", "y", "0000"])).tolist() == [300, -1, 501, 0]
    assert PathIndex(paths).find(pa.array([], pa.string())).tolist() == []


@example([(0, 0), (0, 1), (3, 4)], 4)
@given(st.lists(samples, max_size=40), st.integers(1, 12))
def test_remaining_spans_contain_the_samples_that_are_not_done(pairs: list[tuple[int, int]], max_rows: int) -> None:
    done = DoneBitmap(np.array(COUNTS, np.int64))
    done.add(*columns(pairs))
    files = pa.table(
        {
            "size_bytes": [10] * 6,
            "num_samples": [None if count == UNKNOWN else count for count in COUNTS],
            "row_group_rows": [[], [], [], [4, 5], [], [6, 6, 8]],
            "row_group_bytes": [[], [], [], [4, 5], [], [6, 6, 8]],
        }
    )
    planned = spans.plan(files, max_rows, 10_000)
    left = spans.remaining(planned, done)
    rows = [
        (piece.file, row)
        for span in left
        for piece in span
        if piece.file != 1
        for row in range(piece.start, COUNTS[piece.file] if piece.stop is None else piece.stop)
    ]
    everything = {(file, row) for file, count in enumerate(COUNTS) for row in range(max(count, 0))}
    assert len(rows) == len(set(rows))
    assert everything - set(pairs) <= set(rows)
    for span in left:
        for piece in span:
            if piece.file != 1:
                end = COUNTS[piece.file] if piece.stop is None else piece.stop
                assert (piece.file, piece.start) not in pairs
                assert (piece.file, end - 1) not in pairs
    assert [piece.file for span in left for piece in span].count(1) == 1
    assert spans.num_missing(planned, done) is None


@pytest.mark.parametrize("count", [7, 8, 9, 16])
def test_the_complement_of_some_samples_ends_at_the_last_one_of_a_file_of_unknown_count(count: int) -> None:
    counts = np.array([count, UNKNOWN, UNKNOWN, 3])
    some = [(0, 0), (0, count - 1), (1, 2), (1, 4), (3, 1)]
    bitmap = DoneBitmap.all_but(counts, *np.array(some).T)
    expected = [[*range(1, count - 1)], [0, 1, 3], [], [0, 2]]
    assert [
        np.flatnonzero(bitmap.rows(file, 0, 20 if file in (1, 2) else None)).tolist() for file in range(4)
    ] == expected
    assert len(bitmap) == sum(map(len, expected))
