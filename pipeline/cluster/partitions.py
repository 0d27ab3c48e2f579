"""Maps a function over partitions of files, in order: in the calling process, or as Ray tasks if there is much work.

Planning runs before the job's Ray session. A source that needs more than `MIN_RAY_S` of one core opens a session of its
own, which the next map uses again; smaller sources never start Ray.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from configs.load import ConfigError
from configs.pool import JobSectionConfig
from pipeline.cluster import ray_session
from pipeline.storage import access

Item = TypeVar("Item")
Result = TypeVar("Result")

MIN_RAY_S = 30.0
"""Estimated seconds of one core from which work runs as Ray tasks; a local session and its workers start in about 10
seconds."""
FILE_S, REMOTE_FILE_S = 2.5e-4, 5e-3
"""Estimated seconds to open a local or remote file and read its footer, several files at a time."""
BYTE_S, ID_S, PARSED_ID_S = 1e-8, 5e-7, 8e-6
"""Estimated seconds to find the lines in a byte of text, to read an id from a column, and to parse it from text."""
MAX_IN_FLIGHT = 256
"""Maximum number of partitions that are submitted or computed and not yet consumed, at two per CPU."""
MAX_RETRIES = 3
"""Number of times that Ray runs a task again after its worker or node died."""
PROGRESS_INTERVAL_S = 10.0


@dataclass(frozen=True)
class Partition(Generic[Item]):
    """An argument of the mapped function, the number of its files, and the names of the first and last of them."""

    item: Item
    num_files: int
    first: str
    last: str


class Workers:
    """Runs functions over partitions; a context manager, because it may start Ray. Without a `job` it never does."""

    def __init__(self, job: JobSectionConfig | None = None) -> None:
        self._job = job
        self._stack = contextlib.ExitStack()
        self._has_session = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._has_session = False
        self._stack.close()

    def map(
        self,
        function: Callable[[Item], Result],
        partitions: Sequence[Partition[Item]],
        work_s: float,
        what: str,
        dotted: str = "source.path",
    ) -> Iterator[Result]:
        """Yield `function(partition.item)` of every partition in order; errors of the function are raised.

        `work_s` is the estimated time on one core. `what` names the work in progress lines, such as "survey". The
        function must be picklable, and must return the same result if Ray runs it again.

        Raises:
            ConfigError: the task of a partition died `MAX_RETRIES` + 1 times; names its files and `dotted`.
        """
        in_ray = self._job is not None and len(partitions) > 1 and work_s >= MIN_RAY_S
        progress = _Progress(what, sum(partition.num_files for partition in partitions), self._shows_progress)
        run = _run_here(function, partitions)
        if in_ray:
            run = self._run_in_ray(function, partitions, what, dotted, progress)
        for partition, result in zip(partitions, run, strict=True):
            progress.add(partition.num_files)
            yield result

    @property
    def _shows_progress(self) -> bool:
        return self._job is not None and self._job.progress and self._job.log == "text"

    def _run_in_ray(
        self,
        function: Callable[[Item], Result],
        partitions: Sequence[Partition[Item]],
        what: str,
        dotted: str,
        progress: _Progress,
    ) -> Iterator[Result]:
        import ray

        assert self._job is not None
        if not self._has_session:
            try:
                self._stack.enter_context(ray_session.session(self._job))
            except ConnectionError as error:
                address, reason = self._job.ray_address, access.reason_of(error)
                raise ConfigError(f"job.ray_address: {address} cannot be reached: {reason}") from None
            self._has_session = True
        task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES, name=what.replace(" ", "_"))(_call)
        shared = ray.put(function)
        max_in_flight = min(MAX_IN_FLIGHT, max(2, 2 * int(ray.cluster_resources().get("CPU", 1))))
        pending: deque[tuple[Partition[Item], Any]] = deque()
        waiting = iter(partitions)
        try:
            while True:
                while len(pending) < max_in_flight and (partition := next(waiting, None)) is not None:
                    pending.append((partition, task.remote(shared, partition.item)))
                if not pending:
                    return
                partition, reference = pending.popleft()
                while not ray.wait([reference], timeout=PROGRESS_INTERVAL_S)[0]:
                    progress.wait()
                yield _result_of(partition, reference, what, dotted)
        finally:
            for _, reference in pending:
                ray.cancel(reference)


IN_PROCESS = Workers()
"""Runs everything in the calling process."""


def _call(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)


def _run_here(function: Callable[[Item], Result], partitions: Sequence[Partition[Item]]) -> Iterator[Result]:
    return (function(partition.item) for partition in partitions)


def _result_of(partition: Partition[Any], reference: Any, what: str, dotted: str) -> Any:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        reason = access.cut(access.reason_of(error), access.MAX_REASON_CHARS)
        raise ConfigError(
            f"{dotted}: the {what} of the files {partition.first} to {partition.last} ended its process "
            f"{MAX_RETRIES + 1} times ({reason}); remove or repair the damaged file among them, or use nodes with more "
            "memory"
        ) from None


class _Progress:
    """Prints the number of files done and their rate to standard error, at most every `PROGRESS_INTERVAL_S`."""

    def __init__(self, what: str, total: int, is_shown: bool) -> None:
        self._what, self._total, self._is_shown = what, total, is_shown
        self._first = self._done = 0
        self._began_s = self._shown_s = 0.0

    def add(self, num_files: int) -> None:
        """Count files; the rate is that since the first result, because Ray may have started before it."""
        self._done += num_files
        now_s = time.monotonic()
        if not self._first:
            self._first, self._began_s, self._shown_s = num_files, now_s, now_s
        elif self._is_shown and now_s - self._shown_s >= PROGRESS_INTERVAL_S:
            self._shown_s = now_s
            rate = (self._done - self._first) / max(now_s - self._began_s, 1e-9)
            line = f"{self._what}: {self._done:,} of {self._total:,} files, {rate:,.0f} files/s"
            print(f"{line}, {(self._total - self._done) / max(rate, 1e-9):,.0f} s left", file=sys.stderr, flush=True)

    def wait(self) -> None:
        """Print that no partition has ended for `PROGRESS_INTERVAL_S`: it is large, or no node has a free CPU."""
        if self._is_shown:
            done = f"{self._what}: {self._done:,} of {self._total:,} files"
            print(f"{done}, waiting for a task or for a free CPU in Ray", file=sys.stderr, flush=True)
