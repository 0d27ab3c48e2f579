"""Maps tables of decoded rows to tables of captions, in the same order, as a Ray Data actor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from actors.checks import Checks
from actors.engine_actor import EngineActor, row_id
from actors.losses import Loss, Output, loss_of
from actors.media import Media, RowMedia, without_fillers
from actors.results import RowRefused
from actors.serving.audited import AuditedEngine, is_audited, split_slots
from actors.serving.engine_thread import Suspect
from actors.serving.recovery import QueuedEngine
from configs.schema import CaptionJobConfig
from decoding.errors import PROMPT_REFUSED
from decoding.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from actors.loading.pair import Pair

LoadPair = Callable[[CaptionJobConfig, int | None], "Pair"]


def render_prompt(render: Callable[[Sequence[dict[str, Any]]], str], messages: Sequence[dict[str, Any]]) -> str:
    """Apply the target's chat template; RowError `prompt_refused` if it raises."""
    try:
        return render(messages)
    except Exception as error:  # chat templates raise arbitrary exceptions
        message = f"the target's chat template refuses this conversation: {error}"
        raise RowRefused(PROMPT_REFUSED, message) from None


class Generate(EngineActor[CaptionJobConfig, "Pair"]):
    """Maps rows of the stage `decoded` to text requests, and completions to rows.

    With `sampling.num_captions_per_prompt` above 1, every row becomes as many adjacent rows with the ids `<id>#0`,
    `<id>#1`, …, whose requests share one prompt; a row with an error becomes as many error rows.
    """

    request_columns = ("sample_id", "messages", "sampling", "error_type")

    def __init__(
        self, config: CaptionJobConfig, *arguments: Any, present: frozenset[str] = frozenset(), **more: Any
    ) -> None:
        self.present = present
        self.rows_per_input = config.sampling.num_captions_per_prompt
        super().__init__(config, *arguments, **more)

    @cached_property
    def _loss(self) -> Loss:
        assert self._config.audit is not None
        return loss_of(self._config.audit.metric, "audit.metric")

    def _make_engine(self, slots: int) -> QueuedEngine:
        if (audit := self._config.active_audit) is None:
            return super()._make_engine(slots)
        slots, plain = split_slots(slots, audit.share)
        return AuditedEngine(super()._make_engine(slots), self._pair.plain_engine, plain)

    @cached_property
    def _checks(self) -> Checks | None:
        return None if self._config.checks is None else Checks(self._config.checks)

    def _checked(self, completions: Mapping[int, Completion]) -> dict[int, Completion]:
        """Return completions with the checks that their texts fail."""
        if self._checks is None:
            return dict(completions)
        return {
            index: replace(completion, failed_checks=self._checks.failed(completion))
            for index, completion in completions.items()
        }

    async def _decode(
        self, requests: Mapping[int, Request], suspects: Mapping[int, Suspect]
    ) -> tuple[dict[int, Completion], dict[int, Completion]]:
        """Decode requests, and again those that fail checks, up to `retry.max_attempts` times.

        Of a row without an attempt that passes, the attempt with the fewest failed checks is kept, the first of
        several. An attempt that fails by an error is the row's last one, and the row fails.
        """
        decoded, plain = await self._decode_once(requests, suspects)
        # Functions of users may take long, and the event loop serves every batch in flight.
        kept = latest = await asyncio.to_thread(self._checked, decoded)
        number_of_attempts = 0 if self._config.retry is None else self._config.retry.max_attempts
        for attempt in range(1, number_of_attempts + 1):
            again = {index: self.again(requests[index], attempt) for index, row in latest.items() if row.failed_checks}
            if not again:
                break
            decoded, own_plain = await self._decode_once(again, suspects)
            latest = await asyncio.to_thread(self._checked, decoded)
            better = {
                index: row
                for index, row in latest.items()
                if row.error is not None or len(row.failed_checks) < len(kept[index].failed_checks)
            }
            kept |= better
            plain |= {index: row for index, row in own_plain.items() if index in better}
        return kept, plain

    async def _decode_once(
        self, requests: Mapping[int, Request], suspects: Mapping[int, Suspect]
    ) -> tuple[dict[int, Completion], dict[int, Completion]]:
        """Decode requests as the base class does; texts begin with the prefix of the answer if the job keeps it."""
        decoded, plain = await super()._decode(requests, suspects)
        prompt = self._config.prompt
        if prompt is None or prompt.answer_prefix is None or not prompt.keep_answer_prefix:
            return decoded, plain
        prefix = prompt.answer_prefix
        return self._with_prefix(prefix, decoded), self._with_prefix(prefix, plain)

    def _with_prefix(self, prefix: str, completions: Mapping[int, Completion]) -> dict[int, Completion]:
        return {index: self._prefixed(prefix, completion) for index, completion in completions.items()}

    def _prefixed(self, prefix: str, completion: Completion) -> Completion:
        if completion.error is not None:
            return completion
        text = self._pair.decode_after(prefix, completion.token_ids)
        if completion.finish_reason == "stop_string":
            starts = (text.find(stop) for stop in self._sampling.stop)
            text = text[: min((start for start in starts if start >= 0), default=len(text))]
        return replace(completion, text=prefix + text)

    def again(self, request: Request, attempt: int) -> Request:
        """Return the request of a further attempt, with the sampling of `retry` and noise of its own."""
        if not attempt:
            return request
        retry = self._config.retry
        assert retry is not None, "further attempts are those of the section retry"
        return replace(request, attempt=attempt, sampling=replace(request.sampling, **retry.options))

    def _plain_requests(self, requests: Mapping[int, Request]) -> dict[int, Request]:
        audit, seed = self._config.active_audit, self._config.job.seed
        if audit is None:
            return {}
        return {
            index: replace(request, plain=True)
            for index, request in requests.items()
            if is_audited(audit.share, seed, request.sample_id)
        }

    def _losses(self, result: pa.Table) -> list[float]:
        if self._config.active_audit is None:
            return []
        return [loss for loss in result["audit_loss"].to_pylist() if loss is not None]

    def _audit_values(self, completion: Completion, plain: Completion | None) -> dict[str, Any]:
        """Return the audit columns; empty if the row has no plain result, and without a loss if it failed itself."""
        if plain is None or plain.error or completion.error:
            return {"audit_text": "", "audit_token_ids": [], "audit_loss": None}
        loss = self._loss(*(Output(result.text, result.token_ids) for result in (completion, plain)))
        return {"audit_text": plain.text, "audit_token_ids": list(plain.token_ids), "audit_loss": loss}

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
        request = Request(row["sample_id"], prompt, media.images, videos=media.videos, inputs=media.inputs, **options)
        if self.rows_per_input == 1:
            return {0: request}
        names = (row_id(row["sample_id"], replica) for replica in range(self.rows_per_input))
        return {
            replica: replace(request, sample_id=name, replica=replica)
            for replica, name in enumerate(names)
            if name not in self.present
        }

    @cached_property
    def _sampling(self) -> Sampling:
        return Sampling(**self._config.sampling.options)

    def _sampling_of(self, options: str) -> dict[str, Any]:
        """Return seed and sampling of a row: the job's values, overridden by the row's JSON object `options`."""
        values = json.loads(options) if options else {}
        seed = values.pop("seed", self._config.job.seed)
        return {"seed": seed, "sampling": replace(self._sampling, **values)}

    def _extra_values(
        self, index: int, row: dict[str, Any], completion: Completion, plain: Completion | None
    ) -> dict[str, Any]:
        values = {"seed": self._sampling_of(row["sampling"])["seed"], **self._audit_values(completion, plain)}
        if self.rows_per_input > 1:
            replica = index % self.rows_per_input
            values |= {"sample_id": row_id(row["sample_id"], replica), "replica": replica}
        return values
