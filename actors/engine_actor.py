"""Base of the engine actors: loading, metrics, events, crash journal, engine thread and the call of one batch.

Subclasses map rows to requests and completions to rows.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from actors.engines import make_engine
from actors.events import Events
from actors.metrics import engine_metrics
from actors.results import Stamp, Tally, counts, errors_of, method_values, torch_threads
from actors.serving.engine_thread import EngineThread, ReportWaits, SteppedEngine, Suspect
from actors.serving.journal import Journal, JournalClient, row_keys
from configs.schema import CaptionJob
from configs.synthesis import SynthesizeJob
from decoding.types import Completion, Request


class EnginePair(Protocol):
    """A loaded pair of target and drafter."""

    @property
    def target_id(self) -> str: ...

    @property
    def drafter_id(self) -> str: ...


Job = TypeVar("Job", CaptionJob, SynthesizeJob)
Pair = TypeVar("Pair", bound=EnginePair)


class EngineActor(Generic[Job, Pair]):
    """Holds one pair and one engine; concurrent calls share the engine's slots.

    One input table becomes exactly one table of `schema`, rows in input order, so that a retry by Ray yields the same
    block. Rows with an error pass through. Each input row becomes `rows_per_input` result rows; `encodes_prompts` moves
    `_requests` to a thread.
    """

    rows_per_input = 1
    encodes_prompts = False

    def __init__(
        self,
        config: Job,
        schema: pa.Schema,
        stamp: Stamp,
        load: Callable[[Job, int | None], Pair],
        tally: Tally | None = None,
        flow: ReportWaits | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._config: Job = config
        self._schema = schema
        self._tally = tally
        self._report = None if flow is None else functools.partial(flow, uuid.uuid4().hex)
        self._events = Events(stamp, config.job.log == "json")
        self._pair: Pair = load(config, torch_threads(config.pool))
        slots = config.pool.slots
        if slots == "auto":
            slots, reason = self._count_slots()
            self._events.emit("slots_counted", num_slots=slots, reason=reason)
        self._metrics = engine_metrics(stamp, config.method.label, slots)
        pair = self._pair
        self._constants = {**asdict(stamp), **method_values(config.method, pair.target_id, pair.drafter_id)}
        self._journal = JournalClient(journal)
        self._engine = EngineThread(
            make_engine(config.method, slots, self._make_engine, self._make_plain_engine),
            mark=functools.partial(self._journal.running, "engine"),
            max_step_s=config.pool.max_step_s,
        )

    async def __call__(self, table: pa.Table) -> AsyncIterator[pa.Table]:
        """Decode one table and yield one table of results."""
        table = self._inputs(table)
        keys = row_keys(table)
        # Blocking calls run in threads, because the event loop serves every batch in flight.
        deaths = await asyncio.to_thread(self._journal.begin, keys)
        if self.encodes_prompts:
            requests, completions = await asyncio.to_thread(self._requests, table, keys, deaths)
        else:
            requests, completions = self._requests(table, keys, deaths)
        indices = [place // self.rows_per_input for place in requests]
        suspects = {number: Suspect(keys[i], deaths[i]) for number, i in enumerate(indices) if deaths[i]}
        for place, completion in zip(requests, await self._decode(list(requests.values()), suspects)):
            completions[place] = completion
        result = self._results(table, completions)
        await asyncio.to_thread(self._journal.end, keys, result.num_rows, errors_of(result))
        waits = self._engine.waits
        if self._tally is not None:
            self._tally(result.num_rows, *counts(completions.values()))
        if self._report is not None:
            self._report(waits)
        self._events.batch(result)
        if self._metrics is not None:
            self._metrics.batch(result, completions.values(), waits)
        yield result

    async def _decode(self, requests: list[Request], suspects: dict[int, Suspect]) -> list[Completion]:
        return await asyncio.wrap_future(self._engine.decode(requests, suspects))

    def _inputs(self, table: pa.Table) -> pa.Table:
        """The rows to decode."""
        return table

    def _count_slots(self) -> tuple[int, str]:
        """The number of slots that fit into memory, and the reason."""
        raise NotImplementedError

    def _make_engine(self, slots: int, *choice: Any) -> SteppedEngine:
        """A new engine with the configured method, or with `method`."""
        raise NotImplementedError

    def _make_plain_engine(self) -> SteppedEngine:
        """A new one-slot engine without a drafter."""
        raise NotImplementedError

    def _requests(
        self, table: pa.Table, keys: Sequence[str], deaths: Sequence[int]
    ) -> tuple[dict[int, Request], dict[int, Completion]]:
        """By result row: the requests to run, and completions of rows that cannot run."""
        raise NotImplementedError

    def _results(self, table: pa.Table, completions: Mapping[int, Completion]) -> pa.Table:
        """One table of the result schema."""
        raise NotImplementedError
