from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.manifest import spans
from pipeline.manifest.manifest import SCHEMA
from pipeline.manifest.spans import Piece


def files_table(files: list[tuple[int, int | None, list[int]]]) -> pa.Table:
    """(size, count, rows of the row groups) per file; every row of a row group weighs 10 bytes."""
    return pa.table(
        {
            "path": [f"{index:04d}" for index in range(len(files))],
            "size_bytes": [size for size, _, _ in files],
            "token": [""] * len(files),
            "num_samples": [count for _, count, _ in files],
            "row_group_rows": [groups for _, _, groups in files],
            "row_group_bytes": [[10 * rows for rows in groups] for _, _, groups in files],
            "row_group_lines": [[] for _ in files],
            "repeated_rows": [[] for _ in files],
        },
        schema=SCHEMA,
    )


def parquet(*groups: int) -> tuple[int, int, list[int]]:
    return 10 * sum(groups), sum(groups), list(groups)


def test_many_small_files_share_a_span_up_to_the_row_limit() -> None:
    planned = spans.plan(files_table([(5, 1, [])] * 7), max_rows=3, max_bytes=1000)
    assert [[piece.file for piece in span] for span in planned] == [[0, 1, 2], [3, 4, 5], [6]]
    assert planned[0][0] == Piece(0, 0, None)


def test_the_byte_limit_closes_a_span_too() -> None:
    planned = spans.plan(files_table([(400, 1, []), (500, 1, []), (200, 1, [])]), max_rows=100, max_bytes=1000)
    assert [[piece.file for piece in span] for span in planned] == [[0, 1], [2]]


def test_a_big_parquet_file_is_cut_at_its_row_groups() -> None:
    planned = spans.plan(files_table([parquet(4, 4, 4)]), max_rows=8, max_bytes=10_000)
    assert list(planned) == [(Piece(0, 0, 8),), (Piece(0, 8, 12),)]


def test_a_row_group_with_too_many_bytes_is_cut_evenly_inside() -> None:
    planned = spans.plan(files_table([parquet(2, 9, 1)]), max_rows=100, max_bytes=40)
    assert list(planned) == [
        (Piece(0, 0, 2),),
        (Piece(0, 2, 5),),
        (Piece(0, 5, 8),),
        (Piece(0, 8, 11), Piece(0, 11, 12)),
    ]


def test_an_empty_row_group_with_more_bytes_than_a_span_is_in_no_span() -> None:
    files = files_table([parquet(2, 0, 3)])
    sizes = files.schema.get_field_index("row_group_bytes")
    files = files.set_column(sizes, files.schema.field(sizes), pa.array([[20, 50, 30]]))
    assert list(spans.plan(files, max_rows=100, max_bytes=40)) == [(Piece(0, 0, 2),), (Piece(0, 2, 5),)]


def test_a_row_group_with_many_small_rows_is_not_cut_because_its_parts_cost_reading_it_again() -> None:
    planned = spans.plan(files_table([parquet(2, 9, 1)]), max_rows=4, max_bytes=10_000)
    assert list(planned) == [(Piece(0, 0, 2),), (Piece(0, 2, 11),), (Piece(0, 11, 12),)]
    planned = spans.plan(files_table([parquet(100, 5)]), max_rows=1, max_bytes=10_000)
    assert [(piece.start, piece.stop) for (piece,) in planned][:3] == [(0, 50), (50, 100), (100, 105)]


def test_a_large_tar_is_one_span_and_small_ones_are_grouped() -> None:
    small, large = spans.ASSUMED_SAMPLE_BYTES, 500 * spans.ASSUMED_SAMPLE_BYTES
    files = files_table([(small, None, []), (small, None, []), (large, None, []), (small, None, [])])
    planned = spans.plan(files, max_rows=100, max_bytes=10**9)
    assert [[piece.file for piece in span] for span in planned] == [[0, 1], [2], [3]]


def test_files_without_rows_are_in_no_span() -> None:
    planned = spans.plan(files_table([(9, 0, []), (9, 1, []), (9, 0, [])]), max_rows=10, max_bytes=100)
    assert list(planned) == [(Piece(1, 0, None),)]


def test_indices_outside_are_refused_and_negative_ones_count_from_the_end() -> None:
    planned = spans.plan(files_table([(5, 1, [])] * 3), max_rows=1, max_bytes=1000)
    assert planned[-1] == (Piece(2, 0, None),)
    with pytest.raises(IndexError):
        planned[3]


FILES = st.lists(
    st.one_of(
        st.lists(st.integers(1, 40), max_size=6).map(lambda groups: parquet(*groups)),
        st.tuples(st.integers(0, 500), st.just(1), st.just([])),
    ),
    min_size=1,
    max_size=12,
)


def rows_of(planned: spans.Spans | list[spans.Span], counts: list[int]) -> list[tuple[int, int]]:
    return [
        (piece.file, row)
        for span in planned
        for piece in span
        for row in range(piece.start, counts[piece.file] if piece.stop is None else piece.stop)
    ]


@settings(deadline=None, max_examples=150)
@given(FILES, st.integers(1, 50), st.integers(1, 600))
def test_every_row_is_in_exactly_one_span_and_in_order(files, max_rows, max_bytes) -> None:
    counts = [count for _, count, _ in files]
    planned = spans.plan(files_table(files), max_rows, max_bytes)
    expected = [(file, row) for file, count in enumerate(counts) for row in range(count)]
    assert rows_of(planned, counts) == expected
    most = max(rows for _, _, groups in files for rows in [1, *groups])
    assert all(len(rows_of([span], counts)) <= max(max_rows, most) for span in planned)
    assert list(spans.plan(files_table(files), max_rows, max_bytes)) == list(planned)


@settings(deadline=None, max_examples=150)
@given(FILES, st.integers(1, 50), st.integers(1, 120))
def test_a_limit_takes_the_first_rows(files, max_rows, limit) -> None:
    counts = [count for _, count, _ in files]
    taken = spans.take(spans.plan(files_table(files), max_rows, 10_000), limit, lambda file, _: counts[file])
    expected = [(file, row) for file, count in enumerate(counts) for row in range(count)]
    assert rows_of(taken, counts) == expected[:limit]


def test_spans_of_whole_files_take_six_bytes_each(monkeypatch) -> None:
    monkeypatch.setattr(spans, "_PIECES_AT_ONCE", 999)
    planned = spans.plan(files_table([(5, 1, [])] * 40_000), max_rows=1000, max_bytes=1 << 30)
    assert planned.files.nbytes + planned.starts.nbytes + planned.stops.nbytes == 6 * 40_000
    assert [piece.file for span in planned for piece in span] == list(range(40_000))
    assert {len(span) for span in planned} == {1000}


@pytest.mark.parametrize("value", [0, -1, 127, 128, 32_767, 32_768, 2**31 - 1, 2**31, 2**40])
def test_narrow_columns_hold_every_row_number(value: int) -> None:
    writer = spans._Writer(1 << 50, 1 << 50)
    writer.add(0, 0, 1)
    writer.add(1, max(0, value - 1), value)
    assert list(writer.finish()) == [(Piece(0, 0, 1), Piece(1, max(0, value - 1), None if value == -1 else value))]


def test_joined_spans_are_those_of_all_parts_in_order() -> None:
    files = files_table([(5, 1, [])] * 7)
    parts = [spans.plan(files.slice(low, 3), 2, 1000, low) for low in (0, 3, 6)]
    empty = spans.plan(files.slice(0, 0), 2, 1000)
    together = spans.joined([empty, *parts, empty])
    assert list(together) == [span for part in parts for span in part]
    assert len(spans.joined([])) == 0
