"""Writes finished rows to spool files within a bounded time, and publishes full files.

A thread of the driver schedules the writes; blocks stay on their nodes until a Ray task writes them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from configs.schema import Sink
from pipeline.output.inventory import Spooled
from pipeline.output.publishing import Publisher
from pipeline.storage.output_dir import DATA, ERRORS

MAX_BUFFERED_BYTES = 256 * 1024**2
"""Buffered blocks are spooled when they reach this size together."""
MAX_DRAIN_SECONDS = 1.0
"""Maximum buffering time while a node drains; rows that exist only on that node are lost with it."""
FENCE_CHECK_S = 30.0


def spool(publisher: Publisher, number: int, *tables: Any) -> list[Spooled]:
    """Call `Publisher.spool`; as a Ray task, it receives its tables from the object store."""
    return publisher.spool(number, tables)


Call = Callable[..., Any]
"""Runs a function with arguments, in this process or in a Ray task, and returns its result."""


def call_here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in this process."""
    return function(*arguments)


def call_in_ray(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function as a Ray task that reserves no CPU, because the graph may use all of them."""
    import ray

    return ray.get(ray.remote(num_cpus=0)(function).remote(*arguments))


@dataclass
class _Buffer:
    """Finished blocks that are not written yet; the first one was added at `since_s`."""

    blocks: list[Any] = field(default_factory=list)
    num_rows: int = 0
    num_bytes: int = 0
    since_s: float = 0.0


class Writer:
    """Buffers, spools and publishes the blocks that the graph returns.

    `waiting` are spool files of earlier attempts to publish, `next_numbers` the first free file number of each folder.
    At the end of its context it spools all received rows, also if the job fails, and publishes them only if it does
    not. Errors of the thread (`Fenced`, OSError) are raised by the next `add`, or at the end.
    """

    def __init__(
        self,
        publisher: Publisher,
        sink: Sink,
        waiting: Iterable[Spooled] = (),
        next_numbers: dict[str, int] | None = None,
        call: Call = call_here,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publisher, self._sink, self._call, self._clock = publisher, sink, call, clock
        self._spooled: dict[str, list[Spooled]] = {DATA: [], ERRORS: []}
        for one in waiting:
            self._spooled[one.folder].append(one)
        self._next = next_numbers or {DATA: 0, ERRORS: 0}
        self._number = 0
        self._held = _Buffer()
        self._changed = threading.Condition()
        self._closing = False
        self._hurried = False
        self._failure: BaseException | None = None
        self._checked_s = clock()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            self._thread.join()
        except BaseException:  # a signal; finished rows are spooled before it is raised again
            self._thread.join()
            raise
        if kind is None:
            if self._failure is not None:
                raise self._failure
            self._publisher.check_alone()
            self._publish(everything=True)

    def add(self, blocks: Sequence[Any], num_rows: int, num_bytes: int) -> None:
        """Buffer finished blocks; wait while the buffer is full."""
        with self._changed:
            try:
                self._changed.wait_for(lambda: self._failure is not None or not self._is_full())
            except BaseException:  # a signal; these blocks are finished and are spooled with the others
                self._hold(blocks, num_rows, num_bytes)
                raise
            if self._failure is not None:
                raise self._failure
            self._hold(blocks, num_rows, num_bytes)

    def _hold(self, blocks: Sequence[Any], num_rows: int, num_bytes: int) -> None:
        if not self._held.blocks:
            self._held.since_s = self._clock()
        self._held.blocks.extend(blocks)
        self._held.num_rows += num_rows
        self._held.num_bytes += num_bytes
        self._changed.notify_all()

    def hurry(self, hurried: bool) -> None:
        """Set whether rows are spooled within `MAX_DRAIN_SECONDS` because a node drains; thread-safe."""
        with self._changed:
            self._hurried = hurried
            self._changed.notify_all()

    def _is_full(self) -> bool:
        return self._held.num_rows >= self._sink.rows_per_file or self._held.num_bytes >= MAX_BUFFERED_BYTES

    def _run(self) -> None:
        try:
            while True:
                held = self._take_due()
                if held is None:
                    return
                self._save(held)
                if not self._closing:
                    self._publish(everything=False)
        except BaseException as failure:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _take_due(self) -> _Buffer | None:
        """Wait until buffered blocks are due to be spooled, and return them; None at the end of the context."""
        with self._changed:
            while True:
                age_s = self._clock() - self._held.since_s
                bound_s = self._sink.max_unsaved_seconds
                bound_s = min(bound_s, MAX_DRAIN_SECONDS) if self._hurried else bound_s
                is_due = self._is_full() or age_s >= bound_s
                if self._held.blocks and (is_due or self._closing):
                    held, self._held = self._held, _Buffer()
                    self._changed.notify_all()
                    return held
                if self._closing:
                    return None
                left_s = bound_s - age_s if self._held.blocks else None
                self._changed.wait(left_s)

    def _save(self, held: _Buffer) -> None:
        if self._clock() - self._checked_s >= FENCE_CHECK_S:
            self._publisher.check_alone()
            self._checked_s = self._clock()
        for one in self._call(spool, self._publisher, self._number, *held.blocks):
            self._spooled[one.folder].append(one)
        self._number += 1

    def _publish(self, everything: bool) -> None:
        """Publish full files, or all spooled rows; a file consists of whole spool files, so it may be smaller."""
        for folder, waiting in self._spooled.items():
            while waiting and (everything or sum(one.num_rows for one in waiting) >= self._sink.rows_per_file):
                waiting.sort(key=lambda one: -one.num_rows)  # small spool files fill up the rest of a file
                taken, num_rows = list[Spooled](), 0
                for one in waiting:
                    if not taken or num_rows + one.num_rows <= self._sink.rows_per_file:
                        num_rows += one.num_rows
                        taken.append(one)
                waiting[:] = [one for one in waiting if one not in taken]
                self._next[folder] = 1 + self._call(
                    Publisher.publish, self._publisher, folder, self._next[folder], taken
                )
                for one in taken:
                    self._publisher.remove(one.relative)
