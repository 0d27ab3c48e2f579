"""The order of training rows: every row once per epoch, shuffled, and resumable at any position."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.load import ConfigError
from pipeline.manifest.row_stream import Draw, RowStream, StreamPosition, read_ahead


class Shelves:
    """Spans of given sizes; ids are s0, s1, … in order. Counts what is read."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.num_read = 0

    @property
    def num_spans(self) -> int:
        return len(self.sizes)

    def read(self, span: int) -> pa.Table:
        self.num_read += 1
        first = sum(self.sizes[:span])
        return pa.table({"sample_id": [f"s{first + index}" for index in range(self.sizes[span])]})


def stream(sizes: list[int], window: int = 7, seed: int = 3) -> RowStream:
    return RowStream(Shelves(sizes), lambda sample_id: not sample_id.endswith("5"), seed, window)


def ids_of(draw: Draw) -> list[str]:
    rows: list[str] = draw.table.column("sample_id").to_pylist()
    return rows


def wanted(sizes: list[int]) -> list[str]:
    return [f"s{number}" for number in range(sum(sizes)) if number % 10 != 5]


def test_every_epoch_has_every_wanted_row_once_in_an_order_of_its_own() -> None:
    sizes = [5, 1, 12, 9, 3]
    draws = list(islice(stream(sizes).draws(4), 21))
    assert [len(ids_of(draw)) for draw in draws] == [4, 4, 4, 4, 4, 4, 3] * 3
    epochs = [[sample_id for draw in draws if draw.epoch == epoch for sample_id in ids_of(draw)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(wanted(sizes)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != wanted(sizes)
    assert [draw.first for draw in draws] == [sum(len(ids_of(d)) for d in draws[:n]) for n in range(len(draws))]


def test_another_seed_gives_another_order_and_the_same_seed_the_same() -> None:
    first, again, other = (ids_of(next(stream([30], 100, seed).draws(27))) for seed in (1, 1, 2))
    assert first == again != other


def test_rows_are_mixed_within_a_window_and_not_beyond_it() -> None:
    order = ids_of(next(stream([100], window=9).draws(90)))
    positions = [wanted([100]).index(sample_id) for sample_id in order]
    assert [sorted(positions[start : start + 9]) for start in range(0, 90, 9)] == [
        list(range(start, start + 9)) for start in range(0, 90, 9)
    ]
    assert positions != sorted(positions)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 1),
    window=st.integers(1, 15),
    batch=st.integers(1, 9),
    cut=st.integers(0, 30),
)
def test_a_stream_resumed_at_any_position_gives_the_rows_of_an_uninterrupted_one(
    sizes: list[int], window: int, batch: int, cut: int
) -> None:
    whole = list(islice(stream(sizes, window).draws(batch), cut + 12))
    position = whole[cut - 1].position if cut else None
    later = list(islice(stream(sizes, window).draws(batch, position), 12))
    assert [(ids_of(draw), draw.epoch, draw.first, draw.position) for draw in later] == [
        (ids_of(draw), draw.epoch, draw.first, draw.position) for draw in whole[cut:]
    ]


def test_rows_before_a_position_are_not_read_again() -> None:
    rows = stream([10] * 20, window=10)
    draws = rows.draws(9)
    for _ in range(15):
        position = next(draws).position
    assert isinstance(rows.spans, Shelves)
    rows.spans.num_read = 0
    next(rows.draws(9, position))
    assert rows.spans.num_read <= 4


def test_a_position_is_five_numbers_that_json_restores() -> None:
    position = next(stream([20]).draws(6)).position
    assert StreamPosition(**vars(position)) == position
    assert Counter(map(type, vars(position).values())) == {int: 5}


def test_a_source_without_a_wanted_row_is_refused() -> None:
    rows = RowStream(Shelves([3, 4]), lambda sample_id: False, 0, 5)
    with pytest.raises(ConfigError, match=r"^source: no row is left"):
        next(rows.draws(2))


def test_reading_ahead_changes_neither_order_nor_errors() -> None:
    def numbers() -> object:
        yield from range(20)
        raise KeyError("torn")

    rows: list[int] = []
    with pytest.raises(KeyError, match="torn"):
        rows.extend(read_ahead(numbers(), 3))  # type: ignore[arg-type]
    assert rows == list(range(20))
    assert list(read_ahead(iter("abc"), 5)) == ["a", "b", "c"]
    endless = read_ahead(iter(int, 1), 2)
    assert next(endless) == 0
    endless.close()  # type: ignore[attr-defined]
