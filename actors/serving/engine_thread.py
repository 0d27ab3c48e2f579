"""Runs one engine on its own thread and decodes batches from any number of callers.

An exception of the engine ends the process, so that Ray replaces it; a row that fails alone becomes a completion with
an error. A step that exceeds its time limit ends the process as well. Rows that were in flight when a process died
(`Suspect`) enter the engine before new rows, after the ledger has recorded them; after two deaths, alone.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace

from actors.results import TrialResult
from actors.serving.crash_ledger import ALONE_FROM_DEATHS
from actors.serving.recovery import QueuedEngine
from actors.serving.watchdog import Watchdog
from decoding.scheduling.queue import RequestGroup, RequestQueue
from decoding.types import Completion, Request

logger = logging.getLogger(__name__)

EXIT_STATUS_OF_A_DEAD_ENGINE = 1


@dataclass(frozen=True)
class Waits:
    """Wait times of an engine from its first to its last batch.

    `idle_s` is time without a row, `queued_s` is decoding time while further rows waited for a slot, and `total_s` is
    all time. `choices` are the results of trials of methods.
    """

    idle_s: float = 0.0
    queued_s: float = 0.0
    total_s: float = 0.0
    choices: tuple[TrialResult, ...] = ()

    def __add__(self, other: Waits) -> Waits:
        return Waits(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def actors_waited(self) -> float:
        """Share of time in which actors waited for input."""
        return self.idle_s / self.total_s if self.total_s else 0.0

    @property
    def input_waited(self) -> float:
        """Share of time in which input waited for actors."""
        return self.queued_s / self.total_s if self.total_s else 0.0


@dataclass(frozen=True)
class Suspect:
    """A row that was in flight when `num_deaths` processes died; `key` identifies it in the ledger."""

    key: str
    num_deaths: int


@dataclass
class _Batch:
    """One caller's batch: its size, its future, and its completions so far by index."""

    size: int
    future: Future[list[Completion]] = field(default_factory=Future)
    completions: dict[int, Completion] = field(default_factory=dict)


@dataclass(frozen=True)
class _Row:
    """One request of a batch."""

    batch: _Batch
    index: int
    request: Request
    suspect: Suspect | None


ReportWaits = Callable[[str, Waits], None]
"""Called after each batch with the actor's id and its wait times so far."""
Mark = Callable[[Sequence[str]], None]
"""Records the keys of the suspects in the engine, before it runs them."""


class EngineThread:
    """Runs `engine` on its own thread, and refills its slots from all batches in flight, in order of arrival.

    Requests with equal `sample_id` never run at the same time, so that the id of a completion identifies its row.
    """

    def __init__(
        self,
        engine: QueuedEngine,
        die: Callable[[BaseException], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        mark: Mark | None = None,
        max_step_s: float | None = None,
    ) -> None:
        self._engine = engine
        self._die = die or end_process
        self._clock = clock
        self._mark = mark
        self._watchdog = Watchdog(max_step_s)
        self._queue = RequestQueue()
        # Rows by sample id, in order of arrival; the first row of each id is in the queue or in the engine.
        self._rows: dict[str, deque[_Row]] = {}
        self._suspects: list[str] = []
        self._marked: list[str] = []
        self._runs_alone = False
        self._arrived: queue.SimpleQueue[list[_Row] | None] = queue.SimpleQueue()
        self._waits = Waits()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def decode(
        self, requests: Sequence[Request], suspects: Mapping[int, Suspect] | None = None
    ) -> Future[list[Completion]]:
        """Submit a batch; the future resolves to its completions in the order of `requests`. Thread-safe.

        `suspects` maps the indices of requests that were in flight when a process died.
        """
        assert not suspects or self._mark is not None, "suspects need a ledger"
        batch, known = _Batch(len(requests)), suspects or {}
        if requests:
            self._arrived.put([_Row(batch, index, request, known.get(index)) for index, request in enumerate(requests)])
        else:
            batch.future.set_result([])
        return batch.future

    @property
    def waits(self) -> Waits:
        """Wait times so far, excluding the time before the first and after the last batch."""
        return replace(self._waits, choices=getattr(self._engine, "choices", ()))

    def close(self) -> None:
        """Finish all submitted batches, then end the thread."""
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            is_open = True
            last_s: float | None = None
            while is_open or self._engine.has_work:
                is_idle = not self._engine.has_work
                is_open = self._take_arrivals() and is_open
                if last_s is not None and is_idle and self._engine.has_work:
                    idle_s = self._clock() - last_s
                    self._waits += Waits(idle_s=idle_s, total_s=idle_s)
                if self._engine.has_work:
                    self._watchdog.watch()
                    began_s = self._clock()
                    done = self._engine.step()
                    last_s = self._clock()
                    queued_s = last_s - began_s if self._engine.num_waiting or self._queue.num_waiting else 0.0
                    self._waits += Waits(queued_s=queued_s, total_s=last_s - began_s)
                    for completion in done:
                        self._deliver(completion)
                    self._feed()
                    if not self._engine.has_work:
                        self._watchdog.rest()
        except BaseException as error:
            self._die(error)

    def _take_arrivals(self) -> bool:
        """Queue every batch that has arrived, and wait for one if the engine is idle. Return False after `close`."""
        may_wait = not self._engine.has_work
        while True:
            try:
                rows = self._arrived.get(block=may_wait)
            except queue.Empty:
                return True
            if rows is None:
                return False
            may_wait = False
            for row in rows:
                same_id = self._rows.setdefault(row.request.sample_id, deque())
                same_id.append(row)
                if len(same_id) == 1:
                    self._enqueue(row)
            self._feed()

    # --- scheduling of suspects ------------------------------------------------------------------------------------

    def _enqueue(self, row: _Row) -> None:
        group = RequestGroup.NEW
        if row.suspect is not None:
            group = RequestGroup.SUSPECT if row.suspect.num_deaths < ALONE_FROM_DEATHS else RequestGroup.ALONE
        self._queue.submit(row.request, group)

    def _feed(self) -> None:
        """Submit requests to the engine: first requests that run alone, then suspects, then new requests.

        A new request becomes a suspect as well if it is in flight beside a suspect when the process dies.
        """
        waiting = self._queue.waiting
        if not (self._engine.has_work and (waiting(RequestGroup.ALONE) or self._runs_alone)):
            self._runs_alone = bool(waiting(RequestGroup.ALONE))
            if self._runs_alone:
                self._submit(RequestGroup.ALONE)
            else:
                for _ in range(min(len(waiting(RequestGroup.SUSPECT)), self._engine.num_free_slots)):
                    self._submit(RequestGroup.SUSPECT)
                while waiting(RequestGroup.NEW) and not waiting(RequestGroup.SUSPECT):
                    self._submit(RequestGroup.NEW)
        if self._mark is not None and self._marked != self._suspects:
            self._marked = list(self._suspects)
            self._mark(self._marked)

    def _submit(self, group: RequestGroup) -> None:
        """Submit the first request of a group to the engine."""
        request = self._queue.pop(group)
        suspect = self._rows[request.sample_id][0].suspect
        if suspect is not None:
            self._suspects.append(suspect.key)
        self._engine.submit(request)

    def _deliver(self, completion: Completion) -> None:
        same_id = self._rows[completion.sample_id]
        row = same_id.popleft()
        if same_id:
            self._enqueue(same_id[0])
        else:
            del self._rows[completion.sample_id]
        if row.suspect is not None:
            self._suspects.remove(row.suspect.key)
        batch = row.batch
        batch.completions[row.index] = completion
        if len(batch.completions) == batch.size:
            batch.future.set_result([batch.completions[index] for index in range(batch.size)])


def end_process(error: BaseException) -> None:
    """Log the error and end the process without clean-up.

    Ray treats `sys.exit` and `exit_actor` as intended exits, after which it does not run the rows in flight again.
    """
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    logger.critical("the engine failed and its actor ends, to be replaced: %s", reason, exc_info=error)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(0.2)  # Ray's log monitor reads what the process wrote
    os._exit(EXIT_STATUS_OF_A_DEAD_ENGINE)
