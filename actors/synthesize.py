"""The Ray Data actor that draws codes: a table of prepared prompts in, a table of coded images out, in the same order.

Owns the translation between Arrow rows and the engine's requests and completions, for images. Knows nothing of pixels,
sources, sinks or how Ray schedules it; the schema of its output comes from whoever builds the graph.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from actors.engines import make_engine
from actors.events import Events
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
from actors.serving.engine_thread import EngineThread, ReportWaits, SteppedEngine, Suspect, end_process
from actors.serving.journal import ENGINE_DIED, GIVEN_UP_FROM_DEATHS, Holder, Journal, row_keys, told_of_deaths
from configs.method import Method
from configs.synthesis import SynthesizeJob
from decoding.types import Completion, Request, Sampling

Condition = NDArray[np.float32] | int
OWN_COLUMNS = [
    *("sample_id", "prompt", "label", "error_type"),
    *("seed", "temperature", "top_k", "top_p", "guidance_scale"),
]
"""What a request is made of, beside ready features."""


class ConditionError(ValueError):
    """A prompt that the text encoder refuses: a stable code and a message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ImagePair(Protocol):
    """What the actor needs of `actors.loading.image_pair.ImagePair`."""

    @property
    def target_id(self) -> str: ...

    @property
    def drafter_id(self) -> str: ...

    @property
    def num_image_tokens(self) -> int: ...

    def encode(self, prompt: str) -> NDArray[np.float32]:
        """A prompt's features (L, condition_dim).

        Raises:
            ConditionError: the prompt is refused.
        """
        ...

    def engine(self, slots: int, choice: Method | None = None) -> SteppedEngine: ...

    def plain_engine(self) -> SteppedEngine: ...

    def count_slots(self) -> tuple[int, str]: ...


LoadPair = Callable[[SynthesizeJob, int | None], ImagePair]


def load_pair(config: SynthesizeJob, num_threads: int | None) -> ImagePair:
    """Load target, drafter and text encoder; torch is first imported here, inside the actor's process."""
    from transformers.utils.logging import disable_progress_bar

    import actors.loading.image_pair

    disable_progress_bar()
    return actors.loading.image_pair.load(config, torch_threads=num_threads)


class Synthesize:
    """Holds one image pair and one engine; several calls run at once and share the engine's slots.

    A call is batch in, batch out: one table of the stage `prepared` becomes exactly one table of `schema`. Every prompt
    gives `sampling.num_images_per_prompt` rows side by side, with the ids `<id>#0`, `<id>#1`, …, and is encoded once.
    Rows that carry an error already give as many error rows. Images that are `present` in the output are left out.
    """

    def __init__(
        self,
        config: SynthesizeJob,
        schema: pa.Schema,
        stamp: Stamp,
        load: LoadPair = load_pair,
        tally: Tally | None = None,
        flow: ReportWaits | None = None,
        journal: Journal | None = None,
        present: frozenset[str] = frozenset(),
    ) -> None:
        self._config = config
        self._present = present
        self._schema = schema
        self._tally = tally
        self._report = None if flow is None else functools.partial(flow, uuid.uuid4().hex)
        self._events = Events(stamp, config.job.log == "json")
        self._pair = load(config, torch_threads(config.pool))
        slots = config.pool.slots
        if slots == "auto":
            slots, reason = self._pair.count_slots()
            self._events.say("slots_counted", num_slots=slots, reason=reason)
        self._metrics = engine_metrics(stamp, config.method.label, slots)
        self._num_replicas = config.sampling.num_images_per_prompt
        self._encoding = threading.Lock()
        self._constants = {
            **asdict(stamp),
            **method_values(config.method, self._pair.target_id, self._pair.drafter_id),
        }
        self._holder = Holder(journal)
        engine = make_engine(config.method, slots, self._pair.engine, self._pair.plain_engine)
        self._engine = EngineThread(
            engine,
            mark=functools.partial(self._holder.running, "engine"),
            max_step_s=config.pool.max_step_s,
        )

    async def __call__(self, table: pa.Table) -> AsyncIterator[pa.Table]:
        """Draw the codes of one table of the stage `prepared` and yield one table of results."""
        # Elsewhere, because text encoders take their time and this loop serves every batch in flight.
        keys = row_keys(table)
        deaths = await asyncio.to_thread(self._holder.begin, keys)
        requests, completions = await asyncio.to_thread(self._requests, table, keys, deaths)
        rows = [place // self._num_replicas for place in requests]
        suspects = {number: Suspect(keys[row], deaths[row]) for number, row in enumerate(rows) if deaths[row]}
        for place, completion in zip(requests, await self._decode(list(requests.values()), suspects)):
            completions[place] = completion
        result = self._missing(self._results(table, completions))
        await asyncio.to_thread(self._holder.end, keys, result.num_rows, errors_of(result))
        if self._tally is not None:
            self._tally(result.num_rows, *counts(completions.values()))
        if self._report is not None:
            self._report(self._engine.waits)
        self._events.batch(result)
        if self._metrics is not None:
            self._metrics.batch(result, completions.values(), self._engine.waits)
        yield result

    async def _decode(self, requests: list[Request], suspects: dict[int, Suspect]) -> list[Completion]:
        return await asyncio.wrap_future(self._engine.decode(requests, suspects))

    def _requests(
        self, table: pa.Table, keys: Sequence[str], deaths: Sequence[int]
    ) -> tuple[dict[int, Request], dict[int, Completion]]:
        """Per output row: the request to run, or the completion that a row gets without running."""
        requests: dict[int, Request] = {}
        completions: dict[int, Completion] = {}
        for index, row in enumerate(table.select(OWN_COLUMNS).to_pylist()):
            if row["error_type"]:
                continue
            places = range(index * self._num_replicas, (index + 1) * self._num_replicas)
            try:
                condition = self._condition(table, index, row, keys[index], deaths[index])
            except ConditionError as error:
                for replica, place in enumerate(places):
                    completions[place] = failed(image_id(row["sample_id"], replica), error.code, str(error))
                continue
            sampling = self._sampling(row)
            for replica, place in enumerate(places):
                if image_id(row["sample_id"], replica) in self._present:
                    continue
                requests[place] = Request(
                    sample_id=image_id(row["sample_id"], replica),
                    prompt=row["prompt"],
                    sampling=sampling,
                    seed=row["seed"],
                    replica=replica,
                    condition=condition,
                )
        return requests, completions

    def _condition(self, table: pa.Table, index: int, row: dict[str, Any], key: str, num_deaths: int) -> Condition:
        if num_deaths >= GIVEN_UP_FROM_DEATHS:
            raise ConditionError(ENGINE_DIED, told_of_deaths("the engine's process", num_deaths))
        if row["label"] is not None:
            return int(row["label"])
        features = table.column("features")[index]
        if features.is_valid:
            numbers = np.frombuffer(features["values"].as_buffer(), "<f4").astype(np.float32)
            return numbers.reshape(features["num_tokens"].as_py(), -1)
        with self._encoding, self._marked([key] if num_deaths else []):
            try:
                return self._pair.encode(row["prompt"])
            except ConditionError:
                raise
            except Exception as error:  # as for the engine: what is no refusal of a prompt is a broken device
                end_process(error)
                raise

    @contextlib.contextmanager
    def _marked(self, suspects: list[str]) -> Iterator[None]:
        """Have it written down that these are encoded, while the block runs."""
        if not suspects:
            yield
            return
        self._holder.running("encode", suspects)
        try:
            yield
        finally:
            self._holder.running("encode", [])

    def _sampling(self, row: dict[str, Any]) -> Sampling:
        return Sampling(
            max_new_tokens=self._pair.num_image_tokens,
            temperature=row["temperature"],
            top_k=row["top_k"],
            top_p=row["top_p"],
            guidance_scale=row["guidance_scale"],
            guidance_interval=self._config.sampling.guidance_interval,
        )

    def _missing(self, result: pa.Table) -> pa.Table:
        """The rows that no earlier attempt has made."""
        if not self._present:
            return result
        ids = result.column("sample_id").to_pylist()
        return result.filter(pa.array([sample_id not in self._present for sample_id in ids], pa.bool_()))

    def _results(self, table: pa.Table, completions: dict[int, Completion]) -> pa.Table:
        """One table of the result schema: the prompts' own columns, the run's constants, and what was drawn."""
        own = table.select([name for name in table.column_names if name in self._schema.names])
        repeated = own.take(pa.array(np.repeat(np.arange(table.num_rows), self._num_replicas)))
        values = []
        columns = [repeated.column(name).to_pylist() for name in ("sample_id", "error_type", "error_message")]
        for place, (prompt_id, error_type, error_message) in enumerate(zip(*columns)):
            replica = place % self._num_replicas
            completion = completions.get(place) or failed(prompt_id, error_type, error_message)
            own = own_method_values(self._config.method, self._pair.drafter_id, completion)
            values.append({**result_values(prompt_id, replica, completion), **own})
        return result_table(self._schema, repeated, self._constants, values)


def image_id(prompt_id: str, replica: int) -> str:
    """The sample id of one of a prompt's images."""
    return f"{prompt_id}#{replica}"


def result_values(prompt_id: str, replica: int, completion: Completion) -> dict[str, Any]:
    """The columns that come from one completion."""
    error = completion.error
    return {
        "sample_id": image_id(prompt_id, replica),
        "prompt_id": prompt_id,
        "replica": replica,
        "status": "error" if error else "success",
        "error_type": error.code if error else "",
        "error_message": error.message if error else "",
        "finish_reason": completion.finish_reason,
        "codes": [] if error else list(completion.token_ids),
        "mean_logprob": completion.mean_logprob,
        "num_input_tokens": completion.num_input_tokens,
        "num_generated_tokens": len(completion.token_ids),
        "telemetry": completion.telemetry,
    }
