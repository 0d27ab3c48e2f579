"""Retries the requests of a failed engine with fewer slots, one at a time, or without the drafter.

After an out-of-memory error, the engine is rebuilt with half the slots and its requests run again; noise is keyed by
sample, so their tokens do not change. After a drafter error, which includes missing memory for the drafter with one
slot, the requests in flight run one at a time; a request that fails alone is decoded by an engine without a drafter.
"""

from __future__ import annotations

import gc
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from decoding.errors import OUT_OF_MEMORY, DrafterError, failed
from decoding.scheduling.queue import RequestGroup, RequestQueue
from decoding.types import Completion, Request

if TYPE_CHECKING:
    from decoding import Engine

logger = logging.getLogger(__name__)


class QueuedEngine(ABC):
    """Base class of the engines that `EngineThread` runs: `RecoveringEngine` and `actors.auto.trial.MethodTrial`.
    Waiting and running requests are kept in `queue`, so that they outlive an engine that fails or is replaced."""

    queue: RequestQueue

    @property
    @abstractmethod
    def num_free_slots(self) -> int:
        """Slots minus unfinished requests, at least 0."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Start waiting requests, run one step, and return finished requests."""

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.queue.num_unfinished > 0

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot."""
        return self.queue.num_waiting

    def submit(self, request: Request) -> None:
        """Queue a request; a later `step` with a free slot starts it."""
        self.queue.submit(request)


class RecoveringEngine(QueuedEngine):
    """Steps an engine of at most `slots` slots and, if needed, a one-slot engine without a drafter.

    Sample ids of unfinished requests must be unique. Engines may share `queue` if only one is used at a time.
    """

    def __init__(
        self,
        make: Callable[[int], Engine],
        make_plain: Callable[[], Engine],
        slots: int,
        queue: RequestQueue | None = None,
    ) -> None:
        self.queue = RequestQueue() if queue is None else queue
        self.num_slots = slots
        self._make = make
        self._make_plain = make_plain
        self._full_slots = slots
        self._is_isolating = False
        self._plain: Engine | None = None
        self._plain_request: Request | None = None
        self._engine = self._built()

    @property
    def num_free_slots(self) -> int:
        return max(0, self.num_slots - self.queue.num_unfinished)

    def step(self) -> list[Completion]:
        self._admit()
        reason: str | None = None
        blames_drafter = lacks_memory = False
        done: list[Completion] = []
        try:
            if self._plain_request is not None:
                done += self._step_plain()
            if self._num_batched:
                self._engine.expect(self.queue.upcoming())
                done += self._run(self._engine)
        except Exception as error:
            # If the drafter runs out of memory, fewer slots are tried first.
            lacks_memory = is_out_of_memory(error)
            is_drafters = isinstance(error, DrafterError)
            blames_drafter = is_drafters and not (lacks_memory and self.num_slots > 1)
            if not (lacks_memory or is_drafters):
                raise
            reason = str(error)
        # This is outside the except block, because the exception references the failed engine's memory.
        if reason is not None and blames_drafter:
            self._retry_alone(reason, lacks_memory)
        elif reason is not None:
            done += self._retry_smaller(reason)
        return done

    @property
    def admission_s(self) -> tuple[float, float]:
        """Seconds in which steps of the main engine encoded prompts, and prefilled them."""
        stats = self._engine.stats
        return stats.encode_s, stats.prefill_s

    @property
    def _num_batched(self) -> int:
        """Number of running requests of the main engine."""
        return len(self.queue.running) - (self._plain_request is not None)

    def _admit(self) -> None:
        """Start waiting requests in free slots: first without a drafter, then isolated ones, then retries, then new."""
        queue = self.queue
        if not queue.num_waiting:
            self._is_isolating &= self._num_batched > 0
            return
        room = self.num_slots - len(queue.running)
        if room > 0 and self._plain_request is None and queue.waiting(RequestGroup.PLAIN):
            if self._plain is None:
                self._plain = self._make_plain()
            self._plain_request = queue.start(RequestGroup.PLAIN)
            assert self._plain_request is not None
            self._plain.submit(self._plain_request)
            room -= 1
        if self._is_isolating and self._num_batched:
            return
        self._is_isolating = bool(queue.waiting(RequestGroup.ALONE))
        if self._is_isolating:
            if room > 0 and not self._num_batched and (request := queue.start(RequestGroup.ALONE)) is not None:
                self._engine.submit(request)
            return
        while room > 0 and (request := queue.start(RequestGroup.RETRY) or queue.start(RequestGroup.NEW)) is not None:
            self._engine.submit(request)
            room -= 1

    def _step_plain(self) -> list[Completion]:
        assert self._plain is not None
        done = self._run(self._plain)
        if done:
            self._plain_request = None
        return [replace(completion, telemetry=replace(completion.telemetry, degraded=True)) for completion in done]

    def _run(self, engine: Engine) -> list[Completion]:
        done = engine.step()
        for completion in done:
            self.queue.finish(completion.sample_id)
        return done

    def _batched(self) -> list[Request]:
        return [request for request in self.queue.running.values() if request is not self._plain_request]

    def _retry_alone(self, reason: str, lacks_memory: bool) -> None:
        """Rebuild the engine and queue its requests to run one at a time; a single request runs without the drafter.

        If that single request ran out of memory, which happens with one slot, the number of slots is restored.
        """
        requests = self._batched()
        if len(requests) == 1:
            logger.warning("the row %s is decoded without its drafter: %s", requests[0].sample_id, reason)
            self.queue.requeue(requests, RequestGroup.PLAIN)
            if lacks_memory:
                self.num_slots = self._full_slots
        else:
            self.queue.requeue(requests, RequestGroup.ALONE)
        self._drop_engines(keep_plain=True)
        self._engine = self._built()

    def _retry_smaller(self, reason: str) -> list[Completion]:
        """Halve the slots and retry. With one slot, the request fails instead, and the number of slots is restored.

        Return the completion of the failed request, if any.
        """
        requests, plain_request = self._batched(), self._plain_request
        num_running = len(self.queue.running)
        self._drop_engines()
        as_failed_row: list[Completion] = []
        if self.num_slots == 1:
            (request,) = self.queue.running.values()
            message = f"the device's memory does not hold this sample even alone: {reason}"
            as_failed_row.append(failed(request.sample_id, OUT_OF_MEMORY, message))
            self.queue.finish(request.sample_id)
            self.num_slots = self._full_slots
            logger.warning("the row %s does not fit into the device's memory: %s", request.sample_id, reason)
        else:
            self.queue.requeue(requests, RequestGroup.RETRY, front=True)
            if plain_request is not None:
                self.queue.requeue([plain_request], RequestGroup.PLAIN, front=True)
            slots = 1 if num_running == 1 else self.num_slots // 2
            logger.warning("out of memory with %d slots, continuing with %d: %s", self.num_slots, slots, reason)
            self.num_slots = slots
        self._engine = self._built()
        return as_failed_row

    def _drop_engines(self, keep_plain: bool = False) -> None:
        del self._engine
        if not keep_plain:
            self._plain, self._plain_request = None, None
        release_memory()

    def _built(self) -> Engine:
        """Build an engine, with half the slots after each out-of-memory error."""
        while True:
            try:
                return self._make(self.num_slots)
            except Exception as error:
                if not is_out_of_memory(error) or self.num_slots == 1:
                    raise
                reason = str(error)
            slots = self.num_slots // 2
            logger.warning("no memory for %d slots, continuing with %d: %s", self.num_slots, slots, reason)
            self.num_slots = slots
            release_memory()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is a `torch.OutOfMemoryError`, without importing torch."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def release_memory() -> None:
    """Collect garbage and release cached device memory."""
    gc.collect()
    if "torch" in sys.modules:
        from models.backends.memory import release_unused

        release_unused()
