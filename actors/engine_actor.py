"""Base class of the engine actors: loads the models, decodes batches on the engine thread, and reports metrics.

Subclasses map one row to requests, and add columns to results.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import pyarrow as pa

from actors.auto.trial import make_engine
from actors.events import Events
from actors.losses import MetricError
from actors.metrics import engine_metrics
from actors.results import (
    ReportProgress,
    RowRefused,
    Stamp,
    errors_of,
    method_values,
    result_table,
    result_values,
    torch_threads,
)
from actors.serving.crash_ledger import (
    ENGINE_DIED,
    GIVEN_UP_FROM_DEATHS,
    CrashLedger,
    ProcessLedger,
    deaths_message,
    row_keys,
)
from actors.serving.engine_thread import EngineThread, ReportWaits, Suspect
from actors.serving.recovery import QueuedEngine
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from decoding.errors import failed
from decoding.types import Completion, Request

if TYPE_CHECKING:
    from actors.loading.loaded_pair import LoadedPair

Job = TypeVar("Job", CaptionJobConfig, SynthesizeJobConfig)
Pair = TypeVar("Pair", bound="LoadedPair")


def load_pair(config: Job, num_threads: int | None) -> Any:
    """Load the models of a job; imports torch, inside the actor's process."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from actors.loading import image_pair, pair

    disable_progress_bar()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return image_pair.load(config) if isinstance(config, SynthesizeJobConfig) else pair.load(config)


class EngineActor(ABC, Generic[Job, Pair]):
    """Holds one loaded pair and one engine; concurrent calls share the engine's slots.

    One input table becomes exactly one table of `schema`, rows in input order, so that a retry by Ray yields the same
    block. Rows that already have an error keep it. `request_columns` are the columns of `row` in `_row_requests`.
    """

    rows_per_input = 1
    request_columns: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        config: Job,
        schema: pa.Schema,
        stamp: Stamp,
        load: Callable[[Job, int | None], Pair] = load_pair,
        report_progress: ReportProgress | None = None,
        report_waits: ReportWaits | None = None,
        ledger: CrashLedger | None = None,
    ) -> None:
        self._config: Job = config
        self._schema = schema
        self._report_progress = report_progress
        self._report = None if report_waits is None else functools.partial(report_waits, uuid.uuid4().hex)
        self._events = Events(stamp, config.job.log == "json")
        self._ledger = ProcessLedger(ledger)
        slots = config.pool.slots
        with self._ledger.loading():
            self._pair: Pair = load(config, torch_threads(config.pool))
            if slots == "auto":
                slots, reason = self._pair.count_slots()
                self._events.emit("slots_counted", num_slots=slots, reason=reason)
            engine = self._make_engine(slots)
        self._metrics = engine_metrics(stamp, config.method.label, slots)
        verify_mode, target_id = config.method.verify_mode, self._pair.target_id
        self._constants = {**asdict(stamp), "verify_mode": verify_mode, "target_id": target_id}
        self._engine = EngineThread(
            engine,
            mark=functools.partial(self._ledger.running, "engine"),
            max_step_s=config.pool.max_step_s,
        )

    async def __call__(self, table: pa.Table) -> AsyncIterator[pa.Table]:
        """Decode one table and yield one table of results."""
        table = self._inputs(table)
        keys = row_keys(table)
        # Blocking calls run in threads, because the event loop serves every batch in flight.
        deaths = await asyncio.to_thread(self._ledger.begin, keys)
        requests: dict[int, Request]
        requests, completions = await asyncio.to_thread(self._requests, table, keys, deaths)
        indices = [index // self.rows_per_input for index in requests]
        suspects = {number: Suspect(keys[i], deaths[i]) for number, i in enumerate(indices) if deaths[i]}
        plain: dict[int, Request] = self._plain_requests(requests)
        both = [*requests.values(), *plain.values()]
        decoded: list[Completion] = await asyncio.wrap_future(self._engine.decode(both, suspects))
        completions |= zip(requests, decoded)
        plain_completions: dict[int, Completion] = dict(zip(plain, decoded[len(requests) :], strict=True))
        try:
            result = self._results(table, completions, plain_completions)
        except MetricError as error:
            await asyncio.to_thread(self._ledger.failed, str(error))
            raise
        await asyncio.to_thread(self._ledger.audited, self._losses(result))
        await asyncio.to_thread(self._ledger.end, keys, result.num_rows, errors_of(result))
        waits = self._engine.waits
        if self._report_progress is not None:
            self._report_progress(result)
        if self._report is not None:
            self._report(waits)
        self._events.batch(result)
        if self._metrics is not None:
            self._metrics.batch(result, completions.values(), waits)
        yield result

    def _make_engine(self, slots: int) -> QueuedEngine:
        method = self._config.method
        if method.needs_mtp:
            method = self._pair.available(method)
        return make_engine(method, slots, self._pair.engine, self._pair.plain_engine)

    def _plain_requests(self, requests: Mapping[int, Request]) -> dict[int, Request]:
        """Return the requests that are decoded plainly too, by result row."""
        return {}

    def _losses(self, result: pa.Table) -> list[float]:
        """Return the losses of the rows that were decoded plainly too."""
        return []

    def _inputs(self, table: pa.Table) -> pa.Table:
        """Return the rows of `table` to decode."""
        return table

    def _requests(
        self, table: pa.Table, keys: Sequence[str], deaths: Sequence[int]
    ) -> tuple[dict[int, Request], dict[int, Completion]]:
        """Return the requests to run, and the completions of rows that cannot run, both by result row."""
        requests: dict[int, Request] = {}
        completions: dict[int, Completion] = {}
        arrays_of = self._arrays(table)
        for index, row in enumerate(table.select(self.request_columns).to_pylist()):
            if row["error_type"]:
                continue
            first = index * self.rows_per_input
            try:
                if deaths[index] >= GIVEN_UP_FROM_DEATHS:
                    raise RowRefused(ENGINE_DIED, deaths_message("the engine's process", deaths[index]))
                arrays = functools.partial(arrays_of, index)
                replicas = self._row_requests(row, arrays, keys[index] if deaths[index] else None)
                requests |= {first + replica: request for replica, request in replicas.items()}
            except RowRefused as error:
                failure = failed(row["sample_id"], error.code, str(error))
                completions |= dict.fromkeys(range(first, first + self.rows_per_input), failure)
        return requests, completions

    @abstractmethod
    def _arrays(self, table: pa.Table) -> Callable[[int], Any]:
        """Return a function from a row's index to its arrays."""

    @abstractmethod
    def _row_requests(self, row: dict[str, Any], arrays: Callable[[], Any], suspect: str | None) -> dict[int, Request]:
        """Return the requests of one row by replica, or raise RowError if it cannot run; `suspect` is its ledger key
        if it was in flight when a process died."""

    @abstractmethod
    def _extra_values(
        self, index: int, row: dict[str, Any], completion: Completion, plain: Completion | None
    ) -> dict[str, Any]:
        """Return further result columns of the result row `index`, from its input row, its completion, and that of its
        plain request."""

    def _results(
        self, table: pa.Table, completions: Mapping[int, Completion], plain: Mapping[int, Completion]
    ) -> pa.Table:
        """Return one table of the result schema."""
        if self.rows_per_input > 1:
            table = table.select([name for name in table.column_names if name in self._schema.names])
            table = table.take(pa.array(np.repeat(np.arange(table.num_rows), self.rows_per_input)))
        names = [
            name for name in ("sample_id", "error_type", "error_message", "sampling") if name in table.column_names
        ]
        method, drafter_id = self._config.method, self._pair.drafter_id
        values = []
        for index, row in enumerate(table.select(names).to_pylist()):
            completion = completions.get(index)
            if completion is None:
                completion = failed(row["sample_id"], row["error_type"], row["error_message"])
            common = result_values(completion) | method_values(method, drafter_id, completion)
            values.append(common | self._extra_values(index, row, completion, plain.get(index)))
        return result_table(self._schema, table, self._constants, values)
