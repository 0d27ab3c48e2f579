"""The Ray Data actor for captions: a table of decoded rows in, a table of results out, in the same order."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import pyarrow as pa

import decoding.errors
from actors.engine_actor import EngineActor
from actors.media import Media, without_fillers
from actors.results import Stamp, Tally, failed, own_method_values, result_table
from actors.serving.engine_thread import ReportWaits, SteppedEngine
from actors.serving.journal import ENGINE_DIED, GIVEN_UP_FROM_DEATHS, Journal, deaths_message
from configs.method import Method
from configs.schema import CaptionJob
from decoding.types import Completion, Request, Sampling


class Pair(Protocol):
    """The interface of `actors.loading.pair.Pair`."""

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
    """Load drafter and target; imports torch, inside the actor's process."""
    from transformers.utils.logging import disable_progress_bar

    import actors.loading.pair

    disable_progress_bar()
    return actors.loading.pair.load(config, torch_threads=num_threads)


class Generate(EngineActor[CaptionJob, Pair]):
    """Maps rows of the stage `decoded` to text requests, and completions to rows."""

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
        self._sampling = Sampling(**config.sampling.model_dump())
        super().__init__(config, schema, stamp, load, tally, flow, journal)

    def _inputs(self, table: pa.Table) -> pa.Table:
        return without_fillers(table)

    def _count_slots(self) -> tuple[int, str]:
        return self._pair.count_slots(self._config.pool.max_context_tokens)

    def _make_engine(self, slots: int, *choice: Any) -> SteppedEngine:
        return self._pair.engine(slots, self._config.pool.max_context_tokens, *choice)

    def _make_plain_engine(self) -> SteppedEngine:
        return self._pair.plain_engine(self._config.pool.max_context_tokens)

    def _requests(
        self, table: pa.Table, keys: Sequence[str], deaths: Sequence[int]
    ) -> tuple[dict[int, Request], dict[int, Completion]]:
        requests: dict[int, Request] = {}
        completions: dict[int, Completion] = {}
        names = ("sample_id", "messages", "sampling", "error_type")
        columns = {name: table.column(name).to_pylist() for name in names}
        media = Media(table)
        for index, sample_id in enumerate(columns["sample_id"]):
            if columns["error_type"][index]:
                continue
            if deaths[index] >= GIVEN_UP_FROM_DEATHS:
                message = deaths_message("the engine's process", deaths[index])
                completions[index] = failed(sample_id, ENGINE_DIED, message)
                continue
            try:
                prompt = self._pair.render(json.loads(columns["messages"][index]))
            except Exception as error:  # chat templates raise arbitrary exceptions
                message = f"the target's chat template refuses this conversation: {error}"
                completions[index] = failed(sample_id, decoding.errors.PROMPT_REFUSED, message)
                continue
            images, videos = media.of(index)
            requests[index] = Request(
                sample_id=sample_id,
                prompt=prompt,
                images=images,
                videos=videos,
                **self._sampling_of(columns["sampling"][index]),
            )
        return requests, completions

    def _sampling_of(self, own: str) -> dict[str, Any]:
        """Seed and sampling of a row: the job's, overridden by the row's JSON object."""
        values = json.loads(own) if own else {}
        seed = values.pop("seed", self._config.job.seed)
        return {"seed": seed, "sampling": replace(self._sampling, **values) if values else self._sampling}

    def _results(self, table: pa.Table, completions: Mapping[int, Completion]) -> pa.Table:
        decoded = [
            {
                **(
                    result_values(completions[index])
                    if index in completions
                    else unrun_values(error_type, error_message)
                ),
                **own_method_values(self._config.method, self._pair.drafter_id, completions.get(index)),
                "seed": self._sampling_of(own)["seed"],
            }
            for index, (error_type, error_message, own) in enumerate(
                zip(*(table.column(name).to_pylist() for name in ("error_type", "error_message", "sampling")))
            )
        ]
        return result_table(self._schema, table, self._constants, decoded)


def result_values(completion: Completion) -> dict[str, Any]:
    """Result columns of one completion."""
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
    """Result columns of a row that failed before decoding."""
    return result_values(failed("", error_type, error_message))
