"""Prefills the drafter: encodes and prefills the drafter's prompts when they are first needed, equal prompts once.

If a prompt fails, its samples are decoded without drafts. Samples that never draft skip prefill and image encoding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from decoding.contracts import Drafter
from decoding.controllers.base import PrefillTime
from decoding.errors import CONTEXT_TOO_LONG, OUT_OF_MEMORY, PROMPT_REFUSED, DrafterError
from decoding.scheduling.admission import Admission, prompt_of
from decoding.scheduling.slots import RequestState
from models.backends.select import backend_for
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.kv.lanes import SlotBatch

logger = logging.getLogger(__name__)

DRAFTER_FAILED = "drafter_failed"
Value = TypeVar("Value")


class DrafterPrefill:
    """Prefills the drafter with the prompts of one engine's samples.

    With `is_timed` it synchronises with the device, so that the measured times are exact.
    """

    def __init__(self, drafter: Drafter, admission: Admission, device: torch.device, is_timed: bool) -> None:
        self._drafter = drafter
        self._admission = admission
        self._is_timed = is_timed
        self._device = device
        self._num_tokens, self._seconds = 0, 0.0

    def prefill(self, slots: SlotBatch, progress: Sequence[RequestState]) -> tuple[float, dict[int, str]]:
        """Prefill the samples that the drafter has not prefilled; return the seconds, and error messages by slot.

        The drafter skips slots with errors. In telemetry, a sample counts an equal share of the time, and all forwards.
        """
        unread = [(slot, state) for slot, state in zip(slots.ids, progress, strict=True) if state.unread is not None]
        if not unread:
            return 0.0, {}
        start, forwards_before = time.perf_counter(), self._drafter.num_forwards
        prompts = self._prompts([state for _, state in unread])
        prefixes: dict[int, list[Prefix]] = {}
        failed: dict[int, str] = {}
        for slot, state in unread:
            prefill_output, state.unread = state.unread, None
            assert prefill_output is not None
            lanes, reason = prompts[id(prefill_output)]
            if lanes is not None and (message := self._admission.too_long("drafter", lanes, state.request)):
                reason = f"{CONTEXT_TOO_LONG}: {message}"
            if lanes is None or reason:
                failed[slot] = reason
            else:
                prefixes[slot] = lanes
        failed |= self._prefill(slots, prefixes)
        if failed:
            self._drafter.skip(slots.some(list(failed)))
            for slot, state in unread:
                if slot in failed:
                    logger.warning(
                        "the row %s is decoded without its drafter: %s", state.request.sample_id, failed[slot]
                    )
        if self._is_timed:
            backend_for(self._device).synchronize(self._device)
        spent = time.perf_counter() - start
        self._num_tokens += sum(state.prefix_length for _, state in unread)
        self._seconds += spent
        for _, state in unread:
            state.telemetry.prefill_ms += 1000 * spent / len(unread)
            state.telemetry.drafter_forwards += self._drafter.num_forwards - forwards_before
        return spent, failed

    def _prompts(self, unread: Sequence[RequestState]) -> dict[int, tuple[list[Prefix] | None, str]]:
        """Return the drafter's prompts, or why they fail, by the identity of the target's prefill output, which samples
        with equal prompts share."""
        distinct = {id(state.unread): state for state in unread}
        with self._drafter.encoded_ahead([prompt_of(state.request) for state in distinct.values()]):
            return {
                key: _attempt(self._drafter.prefixes, state.request, state.unread) for key, state in distinct.items()
            }

    def take_prefill_time(self) -> PrefillTime:
        """Return the prefill tokens and seconds since the last call."""
        time_spent = PrefillTime(self._num_tokens, self._seconds)
        self._num_tokens, self._seconds = 0, 0.0
        return time_spent

    def _prefill(self, slots: SlotBatch, prefixes: dict[int, list[Prefix]]) -> dict[int, str]:
        """Prefill a batch; if that fails, prefill one by one. Return the error messages by slot, or raise
        torch.OutOfMemoryError if each of several prompts runs out of memory even alone."""
        if not prefixes:
            return {}
        reason = self._prefill_together(slots, prefixes)
        if not reason or len(prefixes) == 1:
            return dict.fromkeys(prefixes, reason) if reason else {}
        reasons = {slot: self._prefill_together(slots, {slot: lanes}) for slot, lanes in prefixes.items()}
        if all(reason.startswith(OUT_OF_MEMORY) for reason in reasons.values()):
            raise torch.OutOfMemoryError(reason)
        return {slot: reason for slot, reason in reasons.items() if reason}

    def _prefill_together(self, slots: SlotBatch, prefixes: dict[int, list[Prefix]]) -> str:
        # `some` keeps the order of the batch.
        batch = slots.some(list(prefixes))
        return _attempt(self._drafter.prefill, batch, [prefixes[slot] for slot in batch.ids])[1]


def _attempt(call: Callable[..., Value], *arguments: object) -> tuple[Value | None, str]:
    """Return the result and "", or None and "code: message"; a returned exception would keep tensors alive."""
    try:
        return call(*arguments), ""
    except torch.OutOfMemoryError as error:
        return None, f"{OUT_OF_MEMORY}: {error}"
    except (PromptError, DrafterError) as error:
        code = PROMPT_REFUSED if isinstance(error, PromptError) else DRAFTER_FAILED
        return None, f"{code}: the drafter's side: {error}"
