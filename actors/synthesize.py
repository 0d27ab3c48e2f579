"""The Ray Data actor for images: a table of prepared prompts in, a table of image codes out, in the same order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from actors.engine_actor import EngineActor
from actors.results import Stamp, Tally, failed, own_method_values, result_table
from actors.serving.engine_thread import ReportWaits, SteppedEngine, end_process
from actors.serving.journal import ENGINE_DIED, GIVEN_UP_FROM_DEATHS, Journal, deaths_message
from configs.method import Method
from configs.synthesis import SynthesizeJob
from decoding.types import Completion, Request, Sampling

Condition = NDArray[np.float32] | int
OWN_COLUMNS = [
    *("sample_id", "prompt", "label", "error_type"),
    *("seed", "temperature", "top_k", "top_p", "guidance_scale"),
]
"""Columns that a request is made of, besides precomputed features."""


class ConditionError(ValueError):
    """The text encoder refuses a prompt: a stable code and a message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ImagePair(Protocol):
    """The interface of `actors.loading.image_pair.ImagePair`."""

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
    """Load target, drafter and text encoder; imports torch, inside the actor's process."""
    from transformers.utils.logging import disable_progress_bar

    import actors.loading.image_pair

    disable_progress_bar()
    return actors.loading.image_pair.load(config, torch_threads=num_threads)


class Synthesize(EngineActor[SynthesizeJob, ImagePair]):
    """Maps rows of the stage `prepared` to image requests, and completions to rows of codes.

    Every prompt becomes `sampling.num_images_per_prompt` adjacent rows with the ids `<id>#0`, `<id>#1`, …, and is
    encoded once. A row with an error becomes as many error rows. Images whose ids are `present` are left out.
    """

    encodes_prompts = True

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
        self._present = present
        self.rows_per_input = config.sampling.num_images_per_prompt
        self._encoding = threading.Lock()
        super().__init__(config, schema, stamp, load, tally, flow, journal)

    def _count_slots(self) -> tuple[int, str]:
        return self._pair.count_slots()

    def _make_engine(self, slots: int, *choice: Any) -> SteppedEngine:
        return self._pair.engine(slots, *choice)

    def _make_plain_engine(self) -> SteppedEngine:
        return self._pair.plain_engine()

    def _requests(
        self, table: pa.Table, keys: Sequence[str], deaths: Sequence[int]
    ) -> tuple[dict[int, Request], dict[int, Completion]]:
        requests: dict[int, Request] = {}
        completions: dict[int, Completion] = {}
        for index, row in enumerate(table.select(OWN_COLUMNS).to_pylist()):
            if row["error_type"]:
                continue
            places = range(index * self.rows_per_input, (index + 1) * self.rows_per_input)
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
            raise ConditionError(ENGINE_DIED, deaths_message("the engine's process", num_deaths))
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
            except Exception as error:  # as for the engine, any other exception means a broken device
                end_process(error)
                raise

    @contextlib.contextmanager
    def _marked(self, suspects: list[str]) -> Iterator[None]:
        """Record in the journal that the text encoder runs these rows."""
        if not suspects:
            yield
            return
        self._journal.running("encode", suspects)
        try:
            yield
        finally:
            self._journal.running("encode", [])

    def _sampling(self, row: dict[str, Any]) -> Sampling:
        return Sampling(
            max_new_tokens=self._pair.num_image_tokens,
            temperature=row["temperature"],
            top_k=row["top_k"],
            top_p=row["top_p"],
            guidance_scale=row["guidance_scale"],
            guidance_interval=self._config.sampling.guidance_interval,
        )

    def _results(self, table: pa.Table, completions: Mapping[int, Completion]) -> pa.Table:
        own = table.select([name for name in table.column_names if name in self._schema.names])
        repeated = own.take(pa.array(np.repeat(np.arange(table.num_rows), self.rows_per_input)))
        values = []
        columns = [repeated.column(name).to_pylist() for name in ("sample_id", "error_type", "error_message")]
        for place, (prompt_id, error_type, error_message) in enumerate(zip(*columns)):
            replica = place % self.rows_per_input
            completion = completions.get(place) or failed(prompt_id, error_type, error_message)
            own = own_method_values(self._config.method, self._pair.drafter_id, completion)
            values.append({**result_values(prompt_id, replica, completion), **own})
        result = result_table(self._schema, repeated, self._constants, values)
        if not self._present:
            return result
        ids = result.column("sample_id").to_pylist()
        return result.filter(pa.array([sample_id not in self._present for sample_id in ids], pa.bool_()))


def image_id(prompt_id: str, replica: int) -> str:
    """The sample id of one of a prompt's images."""
    return f"{prompt_id}#{replica}"


def result_values(prompt_id: str, replica: int, completion: Completion) -> dict[str, Any]:
    """Result columns of one completion."""
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
