"""Drafter prefill: encodes and prefills the drafter's prompts when they are first needed, equal ones once.

A prompt that fails costs its samples their drafts. Samples that never draft skip all of it, image encoding included.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from decoding.contracts import Drafter, Probe
from decoding.controllers.base import PrefillTime
from decoding.errors import OUT_OF_MEMORY, PROMPT_REFUSED, DrafterError
from decoding.scheduling.admission import Admission
from decoding.scheduling.slots import Progress
from decoding.types import Request
from models.backends.select import backend_for
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.kv.lanes import SlotBatch

logger = logging.getLogger(__name__)

FAILURES: tuple[type[Exception], ...] = (PromptError, DrafterError, torch.OutOfMemoryError)
"""Exceptions that end drafting for one sample; a guarded drafter raises only these and device errors."""
DRAFTER_FAILED = "drafter_failed"


class DrafterPrefill:
    """Prefills the drafter with prompts of one engine's samples.

    With `is_timed` it synchronises with the device, so that the controller gets exact times.
    """

    def __init__(self, drafter: Drafter, admission: Admission, device: torch.device, is_timed: bool) -> None:
        self._drafter = drafter
        self._admission = admission
        self._is_timed = is_timed
        self._device = device
        self._num_tokens, self._seconds = 0, 0.0

    def prefill(self, slots: SlotBatch, progress: Sequence[Progress]) -> tuple[float, dict[int, str]]:
        """Prefill the drafter with the samples that it has not prefilled; returns seconds, and errors by slot.

        The drafter skips slots with errors. In telemetry, the samples share the time, and each counts all forwards.
        """
        unread = [(slot, one) for slot, one in zip(slots.ids, progress, strict=True) if one.unread is not None]
        if not unread:
            return 0.0, {}
        start, forwards_before = time.perf_counter(), self._drafter.num_forwards
        made: dict[int, list[Prefix] | str] = {}
        prefixes: dict[int, list[Prefix]] = {}
        failed: dict[int, str] = {}
        for slot, one in unread:
            probe, one.unread = one.unread, None
            assert probe is not None
            # Samples with equal prompts share one probe, and one drafter prompt.
            if id(probe) not in made:
                made[id(probe)] = self._make(one.request, probe)
            found = self._fitting(one.request, made[id(probe)])
            if isinstance(found, str):
                failed[slot] = found
            else:
                prefixes[slot] = found
        failed |= self._prefill(slots, prefixes)
        if failed:
            self._drafter.skip(slots.some(list(failed)))
            for slot, one in unread:
                if slot in failed:
                    logger.warning("the row %s is decoded without its drafter: %s", one.request.sample_id, failed[slot])
        if self._is_timed:
            backend_for(self._device).synchronize(self._device)
        spent = time.perf_counter() - start
        self._num_tokens += sum(one.prefix_length for _, one in unread)
        self._seconds += spent
        for _, one in unread:
            one.stats.prefill_ms += 1000 * spent / len(unread)
            one.stats.drafter_forwards += self._drafter.num_forwards - forwards_before
        return spent, failed

    def take_prefill_time(self) -> PrefillTime:
        """Prefill tokens and seconds since the last call."""
        time_spent = PrefillTime(self._num_tokens, self._seconds)
        self._num_tokens, self._seconds = 0, 0.0
        return time_spent

    def _make(self, request: Request, probe: Probe) -> list[Prefix] | str:
        """The drafter's prompts of a request, or the error."""
        try:
            return self._drafter.prefixes(request, probe)
        except FAILURES as error:
            return _reason(error)

    def _fitting(self, request: Request, lanes: list[Prefix] | str) -> list[Prefix] | str:
        """The prompts if they and the output fit into the context window, else the error."""
        if isinstance(lanes, str):
            return lanes
        too_long = self._admission.too_long("drafter", lanes, request)
        return lanes if too_long is None else f"{too_long.code}: {too_long.message}"

    def _prefill(self, slots: SlotBatch, prefixes: dict[int, list[Prefix]]) -> dict[int, str]:
        """Prefill a batch; if that fails, prefill one by one and return the errors by slot.

        Raises:
            torch.OutOfMemoryError: every one of several prompts lacks memory.
        """
        if not prefixes:
            return {}
        reason = self._try(slots, prefixes)
        if reason is None:
            return {}
        if len(prefixes) == 1:
            return dict.fromkeys(prefixes, reason)
        reasons = {slot: self._try(slots, {slot: lanes}) for slot, lanes in prefixes.items()}
        if all(reason is not None and reason.startswith(OUT_OF_MEMORY) for reason in reasons.values()):
            raise torch.OutOfMemoryError(reason)
        return {slot: reason for slot, reason in reasons.items() if reason is not None}

    def _try(self, slots: SlotBatch, prefixes: dict[int, list[Prefix]]) -> str | None:
        """Prefill prompts by slot; returns the error, if any."""
        try:
            # `some` keeps the order of the batch.
            batch = slots.some(list(prefixes))
            self._drafter.prefill(batch, [prefixes[slot] for slot in batch.ids])
        except FAILURES as error:
            return _reason(error)
        return None


def _reason(error: Exception) -> str:
    """Code and message; the exception itself would keep tensors alive."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"{OUT_OF_MEMORY}: {error}"
    return f"{PROMPT_REFUSED if isinstance(error, PromptError) else DRAFTER_FAILED}: the drafter's side: {error}"
