"""The Ray Data actor: a table of decoded rows in, a table of results out, in the same order.

Owns the translation between Arrow rows and the engine's requests and completions, for texts. Knows nothing of sources,
sinks or how Ray schedules it; the schema of its output comes from whoever builds the graph.
"""

from __future__ import annotations

import asyncio
import functools
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import pyarrow as pa

import decoding.errors
from actors.engines import make_engine
from actors.events import Events
from actors.media import Media, without_fillers
from actors.metrics import engine_metrics
from actors.results import (
    Stamp,
    Tally,
    counts,
    errors_of,
    failed,
    method_values,
    own_method_values,
    result_table,
    torch_threads,
)
from actors.serving.engine_thread import EngineThread, ReportWaits, SteppedEngine, Suspect
from actors.serving.journal import ENGINE_DIED, GIVEN_UP_FROM_DEATHS, Holder, Journal, row_keys, told_of_deaths
from configs.method import Method
from configs.schema import CaptionJob
from decoding.types import Completion, Request, Sampling


class Pair(Protocol):
    """What the actor needs of `actors.loading.pair.Pair`."""

    @property
    def target_id(self) -> str: ...

    @property
    def drafter_id(self) -> str: ...

    def render(self, messages: Sequence[dict[str, Any]]) -> str: ...

    def engine(self, slots: int, max_context_tokens: int, choice: Method | None = None) -> SteppedEngine: ...

    def plain_engine(self, max_context_tokens: int) -> SteppedEngine: ...

    def count_slots(self, max_context_tokens: int) -> tuple[int, str]: ...


LoadPair = Callable[[CaptionJob, int | None], Pair]


def load_pair(config: CaptionJob, num_threads: int | None) -> Pair:
    """Load drafter and target; torch is first imported here, inside the actor's process."""
    from transformers.utils.logging import disable_progress_bar

    import actors.loading.pair

    disable_progress_bar()  # one bar per shard of every actor's weights is no news to whoever runs the job
    return actors.loading.pair.load(config, torch_threads=num_threads)


class Generate:
    """Holds one pair and one engine; several calls run at once and share the engine's slots.

    A call is batch in, batch out: one table of the stage `decoded` becomes exactly one table of `schema`, rows in input
    order, so that a retry by Ray gives the same block again. Rows that carry an error already pass through untouched.
    """

    def __init__(
        self,
        config: CaptionJob,
        schema: pa.Schema,
        stamp: Stamp,
        load: LoadPair = load_pair,
        tally: Tally | None = None,
        flow: ReportWaits | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._config = config
        self._schema = schema
        self._tally = tally
        self._report = None if flow is None else functools.partial(flow, uuid.uuid4().hex)
        self._events = Events(stamp, config.job.log == "json")
        self._pair = load(config, torch_threads(config.pool))
        slots = config.pool.slots
        if slots == "auto":
            slots, reason = self._pair.count_slots(config.pool.max_context_tokens)
            self._events.say("slots_counted", num_slots=slots, reason=reason)
        self._metrics = engine_metrics(stamp, config.method.label, slots)
        self._sampling = Sampling(**config.sampling.model_dump())
        self._constants = {
            **asdict(stamp),
            **method_values(config.method, self._pair.target_id, self._pair.drafter_id),
        }
        self._holder = Holder(journal)
        num_tokens = config.pool.max_context_tokens
        engine = make_engine(
            config.method,
            slots,
            lambda slots, *choice: self._pair.engine(slots, num_tokens, *choice),
            lambda: self._pair.plain_engine(num_tokens),
        )
        self._engine = EngineThread(
            engine,
            mark=functools.partial(self._holder.running, "engine"),
            max_step_s=config.pool.max_step_s,
        )

    async def __call__(self, table: pa.Table) -> AsyncIterator[pa.Table]:
        """Decode one table of the stage `decoded` and yield one table of results, without what fills the table up."""
        table = without_fillers(table)
        keys = row_keys(table)
        # Elsewhere, as all that waits for an answer: this loop serves every batch in flight.
        deaths = await asyncio.to_thread(self._holder.begin, keys)
        requests, completions = self._requests(table, deaths)
        suspects = {place: Suspect(keys[index], deaths[index]) for place, index in enumerate(requests) if deaths[index]}
        for index, completion in zip(requests, await self._decode(list(requests.values()), suspects)):
            completions[index] = completion
        result = self._results(table, completions)
        await asyncio.to_thread(self._holder.end, keys, result.num_rows, errors_of(result))
        if self._tally is not None:
            self._tally(table.num_rows, *counts(completions.values()))
        if self._report is not None:
            self._report(self._engine.waits)
        self._events.batch(result)
        if self._metrics is not None:
            self._metrics.batch(result, completions.values(), self._engine.waits)
        yield result

    async def _decode(self, requests: list[Request], suspects: dict[int, Suspect]) -> list[Completion]:
        return await asyncio.wrap_future(self._engine.decode(requests, suspects))

    def _requests(self, table: pa.Table, deaths: Sequence[int]) -> tuple[dict[int, Request], dict[int, Completion]]:
        """Per row index: the request to run, or the completion that a row gets without running."""
        requests: dict[int, Request] = {}
        completions: dict[int, Completion] = {}
        names = ("sample_id", "messages", "sampling", "error_type")
        columns = {name: table.column(name).to_pylist() for name in names}
        media = Media(table)
        for index, sample_id in enumerate(columns["sample_id"]):
            if columns["error_type"][index]:
                continue
            if deaths[index] >= GIVEN_UP_FROM_DEATHS:
                message = told_of_deaths("the engine's process", deaths[index])
                completions[index] = failed(sample_id, ENGINE_DIED, message)
                continue
            try:
                prompt = self._pair.render(json.loads(columns["messages"][index]))
            except Exception as error:  # a chat template may raise anything; the row carries it
                message = f"the target's chat template refuses this conversation: {error}"
                completions[index] = failed(sample_id, decoding.errors.PROMPT_REFUSED, message)
                continue
            images, videos = media.of(index)
            requests[index] = Request(
                sample_id=sample_id,
                prompt=prompt,
                images=images,
                videos=videos,
                **self._drawn(columns["sampling"][index]),
            )
        return requests, completions

    def _drawn(self, own: str) -> dict[str, Any]:
        """The request's seed and sampling: the job's, and in their place what is the row's own."""
        values = json.loads(own) if own else {}
        seed = values.pop("seed", self._config.job.seed)
        return {"seed": seed, "sampling": replace(self._sampling, **values) if values else self._sampling}

    def _results(self, table: pa.Table, completions: Mapping[int, Completion]) -> pa.Table:
        """One table of the result schema: the input's own columns, the run's constants, and what was decoded."""
        decoded = [
            {
                **(
                    result_values(completions[index])
                    if index in completions
                    else unrun_values(error_type, error_message)
                ),
                **own_method_values(self._config.method, self._pair.drafter_id, completions.get(index)),
                "seed": self._drawn(own)["seed"],
            }
            for index, (error_type, error_message, own) in enumerate(
                zip(*(table.column(name).to_pylist() for name in ("error_type", "error_message", "sampling")))
            )
        ]
        return result_table(self._schema, table, self._constants, decoded)


def result_values(completion: Completion) -> dict[str, Any]:
    """The columns that come from one completion; `status` follows the finish reason."""
    error = completion.error
    if error is not None:
        status = "error"
    else:
        status = "truncated" if completion.finish_reason == "length" else "success"
    return {
        "status": status,
        "error_type": error.code if error else "",
        "error_message": error.message if error else "",
        "finish_reason": completion.finish_reason,
        "generated_text": completion.text,
        "mean_logprob": completion.mean_logprob,
        "num_input_tokens": completion.num_input_tokens,
        "num_visual_tokens": completion.num_visual_tokens,
        "num_generated_tokens": len(completion.token_ids),
        "telemetry": completion.telemetry,
    }


def unrun_values(error_type: str, error_message: str) -> dict[str, Any]:
    """The columns of a row that failed before it reached the engine."""
    return result_values(failed("", error_type, error_message))
