"""Maps tables of decoded rows to tables of captions, in the same order, as a Ray Data actor."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from actors.engine_actor import EngineActor
from actors.media import Media, RowMedia, without_fillers
from actors.results import RowError
from configs.schema import CaptionJob
from decoding.errors import PROMPT_REFUSED
from decoding.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from actors.loading.pair import Pair

LoadPair = Callable[[CaptionJob, int | None], "Pair"]


def render_prompt(render: Callable[[Sequence[dict[str, Any]]], str], messages: Sequence[dict[str, Any]]) -> str:
    """Apply the target's chat template; RowError `prompt_refused` if it raises."""
    try:
        return render(messages)
    except Exception as error:  # chat templates raise arbitrary exceptions
        message = f"the target's chat template refuses this conversation: {error}"
        raise RowError(PROMPT_REFUSED, message) from None


class Generate(EngineActor[CaptionJob, "Pair"]):
    """Maps rows of the stage `decoded` to text requests, and completions to rows."""

    request_columns: ClassVar = ("sample_id", "messages", "sampling", "error_type")

    def _inputs(self, table: pa.Table) -> pa.Table:
        return without_fillers(table)

    def _arrays(self, table: pa.Table) -> Callable[[int], Any]:
        return Media(table).of

    def _row_requests(self, row: dict[str, Any], arrays: Callable[[], Any], suspect: str | None) -> dict[int, Request]:
        media: RowMedia = arrays()
        prompt = media.prompt
        if prompt is None:
            prompt = render_prompt(self._pair.render, json.loads(row["messages"]))
        options = self._sampling_of(row["sampling"]) | {"grammar": self._pair.grammar}
        return {0: Request(row["sample_id"], prompt, media.images, videos=media.videos, inputs=media.inputs, **options)}

    @cached_property
    def _sampling(self) -> Sampling:
        return Sampling(**self._config.sampling.model_dump())

    def _sampling_of(self, options: str) -> dict[str, Any]:
        """Return seed and sampling of a row: the job's values, overridden by the row's JSON object `options`."""
        values = json.loads(options) if options else {}
        seed = values.pop("seed", self._config.job.seed)
        return {"seed": seed, "sampling": replace(self._sampling, **values)}

    def _extra_values(self, place: int, row: dict[str, Any], completion: Completion) -> dict[str, Any]:
        return {"seed": self._sampling_of(row["sampling"])["seed"]}
