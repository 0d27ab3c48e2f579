"""Publishes finished rows in full files, and spools rows that would otherwise wait longer than a bounded time.

A thread of the driver starts the writes, up to `MAX_TASKS` at the same time; blocks stay on their nodes until a Ray
task on one of these nodes writes them. Only file numbers are assigned by the driver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from configs.schema import SinkConfig
from pipeline.output.file_numbers import FileNumbers
from pipeline.output.inventory import Spooled
from pipeline.output.publishing import WINDOW, Publisher
from pipeline.storage.output_dir import DATA, ERRORS

MAX_BUFFERED_BYTES = 256 * 1024**2
"""Buffered blocks are published when they reach this size together; the object store holds one buffer more than tasks.
"""
MAX_TASKS = 4
"""Maximum number of tasks that write at the same time."""
MAX_DRAIN_SECONDS = 1.0
"""Maximum buffering time while a node drains; rows that exist only on that node are lost with it."""
FENCE_CHECK_S = 30.0


def spool(publisher: Publisher, number: int, *tables: Any) -> list[Spooled]:
    """Call `Publisher.spool`; as a Ray task, it receives its tables from the object store."""
    return publisher.spool(number, tables)


def write(publisher: Publisher, number: int, spool_number: int, *tables: Any) -> tuple[int | None, list[Spooled]]:
    """Call `Publisher.write`; as a Ray task, it receives its tables from the object store."""
    return publisher.write(number, spool_number, tables)


Call = Callable[..., Any]
"""Runs a function with arguments, in this process or in a Ray task, and returns its result."""


def call_here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in this process."""
    return function(*arguments)


def calls_in_ray() -> Call:
    """Return a function that runs a function as a Ray task and waits for it; thread-safe.

    The task reserves no CPU, because the graph may use all of them. Ray prefers the node that holds most of its
    arguments. The head node is used only if there is no other.
    """
    import ray

    options: dict[str, Any] = {"num_cpus": 0}
    head = next((node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]), None)
    if head is not None:
        options["label_selector"] = {"ray.io/node-id": f"!{head}"}
        options["fallback_strategy"] = [{"label_selector": {"ray.io/node-id": head}}]
    tasks = {function: ray.remote(**options)(function) for function in (spool, write, Publisher.publish)}
    return lambda function, *arguments: ray.get(tasks[function].remote(*arguments))


@dataclass
class _Buffer:
    """Finished blocks that are not written yet; the first one was added at `since_s`."""

    blocks: list[Any] = field(default_factory=list)
    num_rows: int = 0
    num_bytes: int = 0
    since_s: float = 0.0

    def is_full(self, sink: SinkConfig) -> bool:
        return self.num_rows >= sink.rows_per_file or self.num_bytes >= MAX_BUFFERED_BYTES


class Writer:
    """Buffers, spools and publishes the blocks that the graph returns.

    `waiting` are spool files of earlier attempts to publish, `next_numbers` the first free file number of each folder,
    which are updated at the end. At the end of its context it spools all received rows, also if the job fails, and
    publishes them only if it does not. Errors of its threads (`Fenced`, OSError) are raised by the next `add`, or at
    the end.
    """

    def __init__(
        self,
        publisher: Publisher,
        sink: SinkConfig,
        waiting: Iterable[Spooled] = (),
        next_numbers: dict[str, int] | None = None,
        call: Call = call_here,
        clock: Callable[[], float] = time.monotonic,
        max_tasks: int = MAX_TASKS,
    ) -> None:
        self._publisher, self._sink, self._call, self._clock = publisher, sink, call, clock
        self._spooled: dict[str, list[Spooled]] = {DATA: [], ERRORS: []}
        for file in waiting:
            self._spooled[file.folder].append(file)
        self._next = next_numbers or {DATA: 0, ERRORS: 0}
        self._numbers = {folder: FileNumbers(first, WINDOW[folder]) for folder, first in self._next.items()}
        self._spool_number = 0
        self._buffer = _Buffer()
        self._changed = threading.Condition()
        self._closing = False
        self._hurried = False
        self._failure: BaseException | None = None
        self._checked_s = clock()
        self._max_tasks = max_tasks
        self._num_tasks = 0
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
            self._next |= {folder: numbers.smallest_free for folder, numbers in self._numbers.items()}

    def add(self, blocks: Sequence[Any], num_rows: int, num_bytes: int) -> None:
        """Buffer finished blocks; wait while the buffer is full."""
        with self._changed:
            try:
                self._changed.wait_for(lambda: self._failure is not None or not self._buffer.is_full(self._sink))
            except BaseException:  # a signal; these blocks are finished and are spooled with the others
                self._hold(blocks, num_rows, num_bytes)
                raise
            if self._failure is not None:
                raise self._failure
            self._hold(blocks, num_rows, num_bytes)

    def _hold(self, blocks: Sequence[Any], num_rows: int, num_bytes: int) -> None:
        if not self._buffer.blocks:
            self._buffer.since_s = self._clock()
        self._buffer.blocks.extend(blocks)
        self._buffer.num_rows += num_rows
        self._buffer.num_bytes += num_bytes
        self._changed.notify_all()

    def hurry(self, hurried: bool) -> None:
        """Set whether rows are spooled within `MAX_DRAIN_SECONDS` because a node drains; thread-safe."""
        with self._changed:
            self._hurried = hurried
            self._changed.notify_all()

    def _run(self) -> None:
        with ThreadPoolExecutor(self._max_tasks, thread_name_prefix="writer-task") as pool:
            while (buffer := self._take_due()) is not None:
                pool.submit(self._write, buffer, self._spool_number)
                self._spool_number += 1

    def _take_due(self) -> _Buffer | None:
        """Wait until buffered blocks are due and a task may start, and return them; None at the end or on a failure."""
        with self._changed:
            while self._failure is None:
                age_s = self._clock() - self._buffer.since_s
                bound_s = self._sink.max_unsaved_seconds
                bound_s = min(bound_s, MAX_DRAIN_SECONDS) if self._hurried else bound_s
                is_due = self._closing or age_s >= bound_s or self._buffer.is_full(self._sink)
                if self._buffer.blocks and is_due and self._num_tasks < self._max_tasks:
                    buffer, self._buffer = self._buffer, _Buffer()
                    self._num_tasks += 1
                    self._changed.notify_all()
                    return buffer
                if self._closing and not self._buffer.blocks:
                    return None
                self._changed.wait(bound_s - age_s if self._buffer.blocks and not is_due else None)
            return None

    def _write(self, buffer: _Buffer, spool_number: int) -> None:
        """Publish a full buffer or spool one that is not full, then publish spool files that fill a file."""
        try:
            self._check_alone()
            if buffer.is_full(self._sink):
                spooled = self._write_full(buffer, spool_number)
            else:
                spooled = self._call(spool, self._publisher, spool_number, *buffer.blocks)
            with self._changed:
                for file in spooled:
                    self._spooled[file.folder].append(file)
            if not self._closing:
                self._publish(everything=False)
        except BaseException as failure:
            with self._changed:
                self._failure = self._failure or failure
        finally:
            with self._changed:
                self._num_tasks -= 1
                self._changed.notify_all()

    def _check_alone(self) -> None:
        with self._changed:
            is_due = self._clock() - self._checked_s >= FENCE_CHECK_S
            self._checked_s = self._clock() if is_due else self._checked_s
        if is_due:
            self._publisher.check_alone()

    def _write_full(self, buffer: _Buffer, spool_number: int) -> list[Spooled]:
        number, published = self._numbers[DATA].take(), None
        spooled: list[Spooled] = []
        try:
            published, spooled = self._call(write, self._publisher, number, spool_number, *buffer.blocks)
        finally:
            self._numbers[DATA].end(number, published)
        return spooled

    def _publish(self, everything: bool) -> None:
        """Publish full files, or all spooled rows; a file consists of whole spool files, so it may be smaller."""
        for folder in self._spooled:
            while taken := self._take_spooled(folder, everything):
                number, published = self._numbers[folder].take(), None
                try:
                    published = self._call(Publisher.publish, self._publisher, folder, number, taken)
                finally:
                    self._numbers[folder].end(number, published)
                for file in taken:
                    self._publisher.remove(file.relative)

    def _take_spooled(self, folder: str, everything: bool) -> list[Spooled]:
        """Remove spool files with up to `rows_per_file` rows from the list, and return them; none if they fill no file
        and not `everything` is published."""
        with self._changed:
            waiting, taken, num_rows = self._spooled[folder], list[Spooled](), 0
            if not everything and sum(file.num_rows for file in waiting) < self._sink.rows_per_file:
                return []
            waiting.sort(key=lambda file: -file.num_rows)  # small spool files fill up the rest of a file
            for file in waiting:
                if not taken or num_rows + file.num_rows <= self._sink.rows_per_file:
                    num_rows += file.num_rows
                    taken.append(file)
            waiting[:] = [file for file in waiting if file not in taken]
            return taken
