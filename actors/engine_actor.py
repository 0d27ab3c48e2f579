"""Base class of the engine actors: loads the models, decodes batches on the engine thread, and reports metrics.

Subclasses map one row to requests, and add columns to results.
"""

from __future__ import annotations

import asyncio
import functools
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
from files.installation import shipped_model

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


def phases_of(report_progress: ReportProgress | None, events: Events) -> Callable[[str], None]:
    """Return a function that reports what an engine does before its first batch."""
    who, report = uuid.uuid4().hex, getattr(report_progress, "phase", None)

    def begin(text: str) -> None:
        events.emit("phase", phase=text)
        if report is not None:
            report(who, text)

    return begin


def weights_text(config: CaptionJobConfig | SynthesizeJobConfig) -> str:
    """Return the bytes of the models' local weight files as text; empty if none is local."""
    paths = [weights.path for _, weights in config.model if weights is not None]
    folders = [Path(path) if os.path.isdir(path) else shipped_model(path) for path in dict.fromkeys(paths)]
    files = [file for folder in folders if folder is not None for file in folder.glob("*.safetensors")]
    num_bytes = sum(file.stat().st_size for file in files)
    return f" ({num_bytes / 1e9:,.1f} GB)" if num_bytes >= 1e8 else f" ({num_bytes / 1e6:,.1f} MB)" if num_bytes else ""


class EngineActor(ABC, Generic[Job, Pair]):
    """Holds one loaded pair and one engine; concurrent calls share the engine's slots.

    One input table becomes exactly one table of `schema`, rows in input order, so that a retry by Ray yields the same
    block. Rows that already have an error keep it. `request_columns` are the columns of `row` in `_row_requests`.
    """

    rows_per_input = 1
    present: frozenset[str] = frozenset()
    """Ids of result rows that the output already has, which are left out."""
    request_columns: tuple[str, ...]

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
        begin_phase = phases_of(report_progress, self._events)
        with self._ledger.loading():
            begin_phase(f"loading weights{weights_text(config)}")
            self._pair: Pair = load(config, torch_threads(config.pool))
            if slots == "auto":
                begin_phase("measuring the memory of a slot")
                slots, reason = self._pair.count_slots()
                self._events.emit("slots_counted", num_slots=slots, reason=reason)
            begin_phase("building the engine: KV caches, kernels, CUDA graphs")
            engine = self._make_engine(slots)
        begin_phase("waiting for the first rows")
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
        inputs = {index: index // self.rows_per_input for index in requests}
        suspects = {index: Suspect(keys[i], deaths[i]) for index, i in inputs.items() if deaths[i]}
        try:
            decoded, plain_completions = await self._decode(requests, suspects)
            completions |= decoded
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

    async def _decode(
        self, requests: Mapping[int, Request], suspects: Mapping[int, Suspect]
    ) -> tuple[dict[int, Completion], dict[int, Completion]]:
        """Return the completions of requests, and of those of them that are decoded plainly too, by result row."""
        plain: dict[int, Request] = self._plain_requests(requests)
        both = [*requests.values(), *plain.values()]
        numbered = {number: suspects[index] for number, index in enumerate(requests) if index in suspects}
        decoded: list[Completion] = await asyncio.wrap_future(self._engine.decode(both, numbered))
        return dict(zip(requests, decoded)), dict(zip(plain, decoded[len(requests) :], strict=True))

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
        names: list[str] = [
            name for name in ("sample_id", "error_type", "error_message", "sampling") if name in table.column_names
        ]
        if self.rows_per_input > 1:
            table = table.select([name for name in table.column_names if name in (*self._schema.names, *names)])
            table = table.take(pa.array(np.repeat(np.arange(table.num_rows), self.rows_per_input)))
        method, drafter_id = self._config.method, self._pair.drafter_id
        values = []
        for index, row in enumerate(table.select(names).to_pylist()):
            completion = completions.get(index)
            if completion is None:
                completion = failed(row["sample_id"], row["error_type"], row["error_message"])
            common = result_values(completion) | method_values(method, drafter_id, completion)
            values.append(common | self._extra_values(index, row, completion, plain.get(index)))
        result = result_table(self._schema, table, self._constants, values)
        if not self.present:
            return result
        ids = result.column("sample_id").to_pylist()
        return result.filter(pa.array([sample_id not in self.present for sample_id in ids], pa.bool_()))


def row_id(prompt_id: str, replica: int) -> str:
    """Return the sample id `<prompt_id>#<replica>` of one of several rows of a prompt."""
    return f"{prompt_id}#{replica}"
