"""What an engine's failure costs, where it need not cost the process: slots, or speculation.

Out of device memory, the engine is made again with half the slots and its rows are run again; their noise is their own,
so their tokens are the same. A drafter's exception, or a lack of memory for it in the only slot, costs its drafts the
row that brings it about alone: an engine with the drafter `none` decodes it. Anything else is passed on. Knows how
engines are made and stepped; nothing of what is in them.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import decoding.errors
from actors.results import failed
from actors.serving.engine_thread import SteppedEngine
from decoding.types import Completion, Request

logger = logging.getLogger(__name__)


class RecoveringEngine:
    """Steps an engine of at most `slots` rows, and beside it, when a row needs it, one of one slot without a drafter.

    `make(slots)` and `make_plain()` give fresh engines; no two rows in work may have the same `sample_id`.
    """

    def __init__(
        self, make: Callable[[int], SteppedEngine], make_plain: Callable[[], SteppedEngine], slots: int
    ) -> None:
        self._make = make
        self._make_plain = make_plain
        self._full_slots = self._slots = slots
        self._waiting: deque[Request] = deque()
        # Rows that were in flight when the drafter failed, to be tried one at a time, and rows that go without it.
        self._tried: deque[Request] = deque()
        self._degraded: deque[Request] = deque()
        self._inside: dict[str, Request] = {}
        self._is_trying = False
        self._expected: Iterable[Request] = ()
        self._plain: SteppedEngine | None = None
        self._plain_row: Request | None = None
        self._engine = self._made()

    @property
    def num_slots(self) -> int:
        """Slots of the engine as it is now."""
        return self._slots

    @property
    def has_work(self) -> bool:
        """Whether a row is waiting or in work."""
        return bool(self.num_waiting or self._num_in_work)

    @property
    def num_waiting(self) -> int:
        """Rows that have no slot yet."""
        return len(self._waiting) + len(self._tried) + len(self._degraded)

    @property
    def num_free_slots(self) -> int:
        """Slots that no row in work and no waiting one will take."""
        return max(0, self._slots - self._num_in_work - self.num_waiting)

    @property
    def _num_in_work(self) -> int:
        return len(self._inside) + (self._plain_row is not None)

    def submit(self, request: Request) -> None:
        """Queue a row; the next `step` with a free slot takes it."""
        self._waiting.append(request)

    def expect(self, requests: Iterable[Request]) -> None:
        """Name the rows that will be submitted next; see `decoding.Engine.expect`."""
        self._expected = requests

    @property
    def unfinished(self) -> list[Request]:
        """All rows that have not finished; where this engine is given up, they can be run again by another."""
        plain_row = [] if self._plain_row is None else [self._plain_row]
        return [*self._inside.values(), *plain_row, *self._tried, *self._degraded, *self._waiting]

    def step(self) -> list[Completion]:
        """One step of every engine that has rows; returns the rows that finished."""
        self._feed()
        reason: str | None = None
        blames_drafter = lacks_memory = False
        done: list[Completion] = []
        try:
            if self._plain_row is not None:
                done += self._step_plain()
            if self._inside:
                done += self._step_engine()
        except Exception as error:
            # Without memory for a drafter, fewer slots are tried first.
            lacks_memory = is_out_of_memory(error)
            is_drafters = isinstance(error, decoding.errors.DrafterError)
            blames_drafter = is_drafters and not (lacks_memory and self._slots > 1)
            if not (lacks_memory or is_drafters):
                raise
            reason = str(error)
        # Outside the block above, whose exception holds on to the failed engine's memory.
        if reason is not None and blames_drafter:
            self._do_without_drafter(reason, lacks_memory)
        elif reason is not None:
            done += self._do_with_less(reason)
        return done

    def _feed(self) -> None:
        """Fill the slots: rows without a drafter, then rows that are tried alone, then all others."""
        room = self._slots - self._num_in_work
        if self._degraded and self._plain_row is None and room > 0:
            if self._plain is None:
                self._plain = self._make_plain()
            self._plain_row = self._degraded.popleft()
            self._plain.submit(self._plain_row)
            room -= 1
        if self._is_trying and self._inside:
            return
        self._is_trying = bool(self._tried)
        if self._tried:
            if room > 0 and not self._inside:
                self._enter(self._tried.popleft())
            return
        while self._waiting and room > 0:
            self._enter(self._waiting.popleft())
            room -= 1

    def _enter(self, request: Request) -> None:
        self._inside[request.sample_id] = request
        self._engine.submit(request)

    def _step_engine(self) -> list[Completion]:
        self._engine.expect(chain(self._tried, self._waiting, self._expected))
        done = self._engine.step()
        for completion in done:
            del self._inside[completion.sample_id]
        return done

    def _step_plain(self) -> list[Completion]:
        assert self._plain is not None
        done = [
            replace(completion, telemetry=replace(completion.telemetry, degraded=True))
            for completion in self._plain.step()
        ]
        if done:
            self._plain_row = None
        return done

    def _do_without_drafter(self, reason: str, lacks_memory: bool) -> None:
        """The engine is not to be trusted: its rows are tried one by one, and one that was alone goes without. If that
        one lacked memory in the only slot, the slots return."""
        rows = list(self._inside.values())
        if len(rows) == 1:
            logger.warning("the row %s is decoded without its drafter: %s", rows[0].sample_id, reason)
            self._degraded.extend(rows)
            if lacks_memory:
                self._slots = self._full_slots
        else:
            self._tried.extend(rows)
        self._drop_engines(keep_plain=True)
        self._engine = self._made()

    def _do_with_less(self, reason: str) -> list[Completion]:
        """Half the slots for the same rows; a row that was alone in the only slot is an error, and the slots return."""
        rows, plain_row = list(self._inside.values()), self._plain_row
        num_rows = self._num_in_work
        self._drop_engines()
        given_up: list[Completion] = []
        if self._slots == 1:
            (row,) = [*rows, plain_row] if plain_row is not None else rows
            error = decoding.errors.out_of_memory(reason)
            given_up.append(failed(row.sample_id, error.code, error.message))
            self._slots = self._full_slots
            logger.warning("the row %s does not fit into the device's memory: %s", row.sample_id, reason)
        else:
            self._waiting.extendleft(reversed(rows))
            if plain_row is not None:
                self._degraded.appendleft(plain_row)
            slots = 1 if num_rows == 1 else self._slots // 2
            logger.warning("out of memory with %d slots, going on with %d: %s", self._slots, slots, reason)
            self._slots = slots
        self._engine = self._made()
        return given_up

    def _drop_engines(self, keep_plain: bool = False) -> None:
        self._inside = {}
        del self._engine
        if not keep_plain:
            self._plain, self._plain_row = None, None
        release_memory()

    def _made(self) -> SteppedEngine:
        """A fresh engine, with as many slots as there is memory for."""
        while True:
            try:
                return self._make(self._slots)
            except Exception as error:
                if not is_out_of_memory(error) or self._slots == 1:
                    raise
                reason = str(error)
            logger.warning("no memory for %d slots, going on with %d: %s", self._slots, self._slots // 2, reason)
            self._slots //= 2
            release_memory()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's allocator raised it; torch is not imported for the question."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def release_memory() -> None:
    """Give what nobody holds any more back to the device."""
    gc.collect()
    if "torch" in sys.modules:
        from models.backends.memory import release_unused

        release_unused()
