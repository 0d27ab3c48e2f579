"""Yields rows of a source in an infinite, deterministic shuffled order that can be resumed at any row.

Every epoch has its own order of spans. Rows fill a window of bounded size, which is shuffled and yielded completely
before the next one fills. Resuming at a `StreamPosition` reads the rows of its window again, but none before it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from configs.load import ConfigError

Item = TypeVar("Item")


class SpanSource(Protocol):
    """Interface of a source that is read span by span (`pipeline.manifest.datasource.SpanDatasource`)."""

    @property
    def num_spans(self) -> int: ...

    def read(self, span: int) -> pa.Table:
        """Read one span's rows, which have the column `sample_id`."""
        ...


@dataclass(frozen=True)
class StreamPosition:
    """The position of the next row: index `taken` of the shuffled window that begins at the `row`-th wanted row of the
    `span`-th span of an `epoch`; `ordinal` is the number of rows yielded before it, over all epochs."""

    epoch: int = 0
    span: int = 0
    row: int = 0
    taken: int = 0
    ordinal: int = 0


@dataclass(frozen=True)
class Draw:
    """A batch of one `epoch`: `table`, its first row's ordinal `first`, and the `position` after its last row."""

    table: pa.Table
    epoch: int
    first: int
    position: StreamPosition


@dataclass(frozen=True)
class RowStream:
    """Rows of `spans` whose id is `wanted`, shuffled by `seed` within windows of `window_rows`."""

    spans: SpanSource
    wanted: Callable[[str], bool]
    seed: int
    window_rows: int

    def draws(self, num_rows: int, position: StreamPosition | None = None) -> Iterator[Draw]:
        """Yield batches of `num_rows` without end, starting at `position`; the last batch of an epoch may be smaller.

        Raises:
            ConfigError: a whole epoch holds no wanted row.
        """
        position = position or StreamPosition()
        while True:
            first, parts, at = position.ordinal, [], position
            for row, at in self._epoch(position):
                parts.append(row)
                if len(parts) == num_rows:
                    yield Draw(pa.concat_tables(parts).combine_chunks(), at.epoch, first, at)
                    first, parts = at.ordinal, []
            if parts:
                yield Draw(pa.concat_tables(parts).combine_chunks(), at.epoch, first, at)
            if at == StreamPosition(epoch=position.epoch, ordinal=position.ordinal):
                raise ConfigError("source: no row is left to learn from; see training.held_out_share")
            position = StreamPosition(epoch=position.epoch + 1, ordinal=at.ordinal)

    def _epoch(self, position: StreamPosition) -> Iterator[tuple[pa.Table, StreamPosition]]:
        at = position
        for window, start in self._windows(position):
            order = list(range(len(window)))
            random.Random(f"{self.seed} {position.epoch} {start}").shuffle(order)
            # Only the first window can be partly consumed.
            num_taken = position.taken if start == (position.span, position.row) else 0
            for taken, number in enumerate(order[num_taken:], num_taken + 1):
                at = StreamPosition(position.epoch, *start, taken, at.ordinal + 1)
                table, index = window[number]
                yield table.slice(index, 1), at

    def _windows(self, position: StreamPosition) -> Iterator[tuple[list[tuple[pa.Table, int]], tuple[int, int]]]:
        """Yield the windows from `position` on, each with the (span, row) of its first row."""
        order = list(range(self.spans.num_spans))
        random.Random(f"{self.seed} {position.epoch}").shuffle(order)
        window: list[tuple[pa.Table, int]] = []
        start = (position.span, position.row)
        for span in range(position.span, len(order)):
            table = self.spans.read(order[span])
            ids = table.column("sample_id").to_pylist()
            indices = [index for index, sample_id in enumerate(ids) if self.wanted(sample_id)]
            first = position.row if span == position.span else 0
            for number, index in enumerate(indices[first:], first):
                if not window:
                    start = (span, number)
                window.append((table, index))
                if len(window) == self.window_rows:
                    yield window, start
                    window = []
        if window:
            yield window, start


def read_ahead(items: Iterator[Item], depth: int) -> Iterator[Item]:
    """Yield the same items, prefetching up to `depth` in a thread; an error is raised at the position of its item."""
    end: Any = object()
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as pool:
        pending: list[Future[Any]] = [pool.submit(next, items, end) for _ in range(max(1, depth))]
        try:
            while (item := pending.pop(0).result()) is not end:
                pending.append(pool.submit(next, items, end))
                yield item
        finally:
            for future in pending:
                future.cancel()
