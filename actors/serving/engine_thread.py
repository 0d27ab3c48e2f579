"""One thread that owns one engine and is fed by any number of callers at once.

Knows `decoding`'s requests and completions, and nothing of Ray, Arrow or event loops. Whatever the engine raises is
taken for unrecoverable (a failing row is a completion with an error, not an exception): the process ends, so that
whoever runs it starts a fresh one. So does a process whose engine does not come back from a step.

Rows that were in flight when a process died are told apart from others (`Suspect`): they enter the engine one by one
as slots fall free, after it was written down; from the second death on with nothing beside them.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

from actors.choice import Choice
from actors.serving.journal import ALONE_FROM_DEATHS
from actors.serving.watchdog import Watchdog
from decoding.types import Completion, Request

logger = logging.getLogger(__name__)

EXIT_STATUS_OF_A_DEAD_ENGINE = 1


class SteppedEngine(Protocol):
    """The part of `decoding.Engine` that the thread, and engines around engines, drive."""

    @property
    def has_work(self) -> bool: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_free_slots(self) -> int: ...

    def submit(self, request: Request) -> None: ...

    def expect(self, requests: Iterable[Request]) -> None: ...

    def step(self) -> list[Completion]: ...


@dataclass(frozen=True)
class Waits:
    """What an engine's time went to, from its first batch to its last: `idle_s` it stood without a row, `queued_s` it
    worked while further rows waited for a slot, `total_s` is all of it. `choices` are the methods that it kept after
    trying several."""

    idle_s: float = 0.0
    queued_s: float = 0.0
    total_s: float = 0.0
    choices: tuple[Choice, ...] = ()

    def __add__(self, other: Waits) -> Waits:
        return Waits(
            self.idle_s + other.idle_s,
            self.queued_s + other.queued_s,
            self.total_s + other.total_s,
            self.choices + other.choices,
        )

    @property
    def actors_waited(self) -> float:
        """The share of time in which the actors waited for input."""
        return self.idle_s / self.total_s if self.total_s else 0.0

    @property
    def input_waited(self) -> float:
        """The share of time in which input waited for the actors."""
        return self.queued_s / self.total_s if self.total_s else 0.0


@dataclass(frozen=True)
class Suspect:
    """A row with a past: its key in the journal, and the deaths of processes that it was in flight at."""

    key: str
    num_deaths: int


@dataclass
class _Batch:
    """Requests of one caller, which of them are suspects, and what came back so far."""

    requests: Sequence[Request]
    suspects: Mapping[int, Suspect] = field(default_factory=dict)
    future: Future[list[Completion]] = field(default_factory=Future)
    completions: list[Completion | None] = field(default_factory=list)
    num_missing: int = 0


_Place = tuple[_Batch, int]

ReportWaits = Callable[[str, Waits], None]
"""Told after each batch: who is reporting, and its waits so far."""
Mark = Callable[[Sequence[str]], None]
"""Told which suspects are in the engine, before they are; returns when it has been written down."""


class EngineThread:
    """Runs `engine` on its own thread; slots are refilled from every batch in flight, in order of arrival.

    Only that thread touches the engine. Two requests with the same `sample_id` never run at the same time, so that a
    completion always belongs to one row, whatever ids the user's data has.
    """

    def __init__(
        self,
        engine: SteppedEngine,
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
        # Rows that are not in the engine yet: those without a past, suspects, and those that run alone.
        self._ready: deque[_Place] = deque()
        self._suspects: deque[_Place] = deque()
        self._lonely: deque[_Place] = deque()
        self._marked: list[str] = []
        self._told: list[str] = []
        self._is_lonely = False
        self._arrived: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._waiting: dict[str, deque[_Place]] = {}
        self._waits = Waits()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def decode(
        self, requests: Sequence[Request], suspects: Mapping[int, Suspect] | None = None
    ) -> Future[list[Completion]]:
        """Hand over a batch; the future resolves to its completions in the order of `requests`. Any thread may call.

        `suspects` are those of the requests, by place, that have a past.
        """
        assert not suspects or self._mark is not None, "suspects are run only where it is written down"
        batch = _Batch(requests=tuple(requests), suspects=suspects or {})
        batch.completions = [None] * len(batch.requests)
        batch.num_missing = len(batch.requests)
        if not batch.requests:
            batch.future.set_result([])
        else:
            self._arrived.put(batch)
        return batch.future

    @property
    def waits(self) -> Waits:
        """Where the time went so far; the wait for a first batch, and for one that never came, is not counted."""
        return replace(self._waits, choices=getattr(self._engine, "choices", ()))

    def close(self) -> None:
        """Finish what was handed over, then end the thread."""
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            open_for_more = True
            last_s: float | None = None
            while open_for_more or self._engine.has_work:
                is_idle = not self._engine.has_work
                open_for_more = self._take_arrivals() and open_for_more
                if last_s is not None and is_idle and self._engine.has_work:
                    idle_s = self._clock() - last_s
                    self._waits += Waits(idle_s=idle_s, total_s=idle_s)
                if self._engine.has_work:
                    self._watchdog.watch()
                    began_s = self._clock()
                    done = self._engine.step()
                    last_s = self._clock()
                    queued_s = last_s - began_s if self._engine.num_waiting or self._num_held else 0.0
                    self._waits += Waits(queued_s=queued_s, total_s=last_s - began_s)
                    for completion in done:
                        self._deliver(completion)
                    self._feed()
                    if not self._engine.has_work:
                        self._watchdog.rest()
        except BaseException as error:
            self._die(error)

    def _take_arrivals(self) -> bool:
        """Move every batch that has arrived into the engine; sleep only while the engine is idle. False once closed."""
        may_wait = not self._engine.has_work
        while True:
            try:
                batch = self._arrived.get(block=may_wait)
            except queue.Empty:
                return True
            if batch is None:
                return False
            may_wait = False
            for index, request in enumerate(batch.requests):
                line = self._waiting.setdefault(request.sample_id, deque())
                line.append((batch, index))
                if len(line) == 1:
                    self._enqueue((batch, index))
            self._feed()

    # --- which rows may be in the engine together ------------------------------------------------------------------

    @property
    def _num_held(self) -> int:
        """Rows that the engine has not got yet."""
        return len(self._ready) + len(self._suspects) + len(self._lonely)

    def _enqueue(self, place: _Place) -> None:
        suspect = _suspect(place)
        if suspect is None:
            self._ready.append(place)
        elif suspect.num_deaths < ALONE_FROM_DEATHS:
            self._suspects.append(place)
        else:
            self._lonely.append(place)

    def _feed(self) -> None:
        """Give the engine what may be in it now: rows that run alone first, then suspects, then all others.

        In that order, because a row without a past that is beside a suspect at a death gets a past.
        """
        if not (self._engine.has_work and (self._lonely or self._is_lonely)):
            self._is_lonely = bool(self._lonely)
            if self._lonely:
                self._submit(self._lonely.popleft())
            else:
                for _ in range(min(len(self._suspects), self._engine.num_free_slots)):
                    self._submit(self._suspects.popleft())
                while self._ready and not self._suspects:
                    self._submit(self._ready.popleft())
        if self._told != self._marked:
            assert self._mark is not None
            self._mark(list(self._marked))
            self._told = list(self._marked)

    def _submit(self, place: _Place) -> None:
        """Queue a row in the engine, which looks at it in its next step."""
        batch, index = place
        suspect = _suspect(place)
        if suspect is not None:
            self._marked.append(suspect.key)
        self._engine.submit(batch.requests[index])

    def _deliver(self, completion: Completion) -> None:
        line = self._waiting[completion.sample_id]
        place = line.popleft()
        if line:
            self._enqueue(line[0])
        else:
            del self._waiting[completion.sample_id]
        suspect = _suspect(place)
        if suspect is not None:
            self._marked.remove(suspect.key)
        batch, index = place
        batch.completions[index] = completion
        batch.num_missing -= 1
        if not batch.num_missing:
            batch.future.set_result([done for done in batch.completions if done is not None])


def _suspect(place: _Place) -> Suspect | None:
    batch, index = place
    return batch.suspects.get(index)


def end_process(error: BaseException) -> None:
    """Log why, give the log a moment to leave the process, and end it without clean-up: a dead engine cannot be used.

    `sys.exit` or Ray's `exit_actor` would count as intended, and the rows in flight would not be run again.
    """
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    logger.critical("the engine failed and its actor ends, to be replaced: %s", reason, exc_info=error)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(0.2)  # the log monitor of Ray reads what the process wrote
    os._exit(EXIT_STATUS_OF_A_DEAD_ENGINE)
