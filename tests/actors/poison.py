"""Simulates rows that end their process, without ending a process."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from actors.serving.crash_ledger import GIVEN_UP_FROM_DEATHS, ErrorBudgetSpent, ProcessLedger
from actors.serving.engine_thread import EngineThread, Suspect
from decoding.types import Completion, Request
from pipeline.run.crash_ledger import CrashLedgerState
from tests.actors.fakes import FakeEngine


class LocalLedger:
    """A ledger over the crash ledger's book in this process."""

    def __init__(self, book: CrashLedgerState) -> None:
        self.book = book

    def begin(self, who: str, keys: Sequence[str]) -> list[int]:
        return self.book.begin(who, keys)

    def running(self, who: str, keys: Sequence[str]) -> None:
        self.book.running(who, keys)

    def end(self, who: str, keys: Sequence[str], num_results: int, errors: Mapping[str, int]) -> None:
        if verdict := self.book.end(who, keys, num_results, errors):
            raise ErrorBudgetSpent(verdict)


class PoisonEngine(FakeEngine):
    """Raises when a row with the word POISON is admitted, and in the last step of one with the word LATE."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.ids_at_death: tuple[str, ...] = ()

    def step(self) -> list[Completion]:
        for request in list(self.waiting)[: self.slots - len(self.active)]:
            if "POISON" in request.prompt:
                self._die(request)
        done = super().step()
        for request, remaining in self.active.values():
            if "LATE" in request.prompt and remaining == 1:
                self._die()
        return done

    def finish(self, request: Request) -> Completion:
        if "LATE" in request.prompt:
            self._die(request)
        return super().finish(request)

    def _die(self, *more: Request) -> None:
        self.ids_at_death = tuple(request.sample_id for request, _ in self.active.values())
        raise RuntimeError("CUDA error")


class Life:
    """Runs the same batches in one simulated process after another, until all are done."""

    def __init__(self, slots: int = 4) -> None:
        self.slots = slots
        self.book = CrashLedgerState()
        self.num_deaths = 0
        self.engines: list[PoisonEngine] = []

    def run(self, batches: Sequence[Sequence[Request]], max_deaths: int = 50) -> list[dict[str, str]]:
        """By batch, the text of every row by id; `engine_died` for a row that was given up."""
        while True:
            done = self._live(batches)
            if done is not None:
                return done
            self.num_deaths += 1
            assert self.num_deaths <= max_deaths, "the rows kill for ever"

    def _live(self, batches: Sequence[Sequence[Request]]) -> list[dict[str, str]] | None:
        holder = ProcessLedger(LocalLedger(self.book))
        died = threading.Event()
        engine = PoisonEngine(self.slots)
        self.engines.append(engine)
        # Batches are held until all have arrived, so that the result does not depend on timing.
        gate = threading.Event()
        engine_step = engine.step

        def step() -> list[Completion]:
            gate.wait()
            return engine_step()

        engine.step = step  # type: ignore[method-assign]
        thread = EngineThread(engine, die=lambda error: died.set(), mark=lambda keys: holder.running("engine", keys))
        results, futures = [], []
        for batch in batches:
            deaths = holder.begin([request.sample_id for request in batch])
            as_failed_row = {
                r.sample_id: "engine_died" for r, n in zip(batch, deaths, strict=True) if n >= GIVEN_UP_FROM_DEATHS
            }
            run = [(r, n) for r, n in zip(batch, deaths, strict=True) if n < GIVEN_UP_FROM_DEATHS]
            suspects = {index: Suspect(r.sample_id, n) for index, (r, n) in enumerate(run) if n}
            futures.append(thread.decode([r for r, _ in run], suspects))
            results.append(as_failed_row)
        gate.set()
        thread.close()
        if died.is_set():
            return None
        for batch, as_failed_row, future in zip(batches, results, futures, strict=True):
            as_failed_row |= {completion.sample_id: completion.text for completion in future.result(timeout=600)}
            holder.end([request.sample_id for request in batch], len(batch), {})
        return results
