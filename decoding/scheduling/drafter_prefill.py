"""The drafter's side of prompts: made when they are first drafted for, once for equal ones, and read.

A prompt that cannot be made or read, for whatever reason, costs its samples their drafts and nothing else. Samples for
which nothing is ever drafted are spared all of it, the drafter's look at their images included. What it takes is kept
for the controller. Knows nothing of steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from decoding.contracts import Drafter, Probe
from decoding.controllers.base import Reading
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
"""What ends the drafting for one sample alone; a drafter that is guarded raises nothing else but faults of the device
(see `decoding.drafters.guarded`)."""
DRAFTER_FAILED = "drafter_failed"


class DrafterPrompts:
    """Prompts of one engine's samples as its drafter sees them.

    `is_timed` says that somebody decides by what reading takes: the device is then waited for, which it was a moment
    before anyway, for the first tokens of the same samples.
    """

    def __init__(self, drafter: Drafter, admission: Admission, device: torch.device, is_timed: bool) -> None:
        self._drafter = drafter
        self._admission = admission
        self._is_timed = is_timed
        self._device = device
        self._num_read, self._read_s = 0, 0.0

    def read(self, slots: SlotBatch, progress: Sequence[Progress]) -> tuple[float, dict[int, str]]:
        """Have the drafter read what it has not read of these samples' prompts; the seconds that it took, and by slot
        why it cannot read one, a code and a message. Those slots are skipped by the drafter.

        Those whose prompts were read share the time in their telemetry; each counts all forwards, as it was in them.
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
            # Samples of one prompt have one probe, and one prompt in the drafter too.
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
        self._num_read += sum(one.prefix_length for _, one in unread)
        self._read_s += spent
        for _, one in unread:
            one.stats.prefill_ms += 1000 * spent / len(unread)
            one.stats.drafter_forwards += self._drafter.num_forwards - forwards_before
        return spent, failed

    def take_reading(self) -> Reading:
        """What was read since this was asked last."""
        reading = Reading(self._num_read, self._read_s)
        self._num_read, self._read_s = 0, 0.0
        return reading

    def _make(self, request: Request, probe: Probe) -> list[Prefix] | str:
        """The prompts of this request, and of all of equal content."""
        try:
            return self._drafter.prefixes(request, probe)
        except FAILURES as error:
            return _reason(error)

    def _fitting(self, request: Request, lanes: list[Prefix] | str) -> list[Prefix] | str:
        """The prompts where they fit beside the output that this request wants."""
        if isinstance(lanes, str):
            return lanes
        too_long = self._admission.too_long("drafter", lanes, request)
        return lanes if too_long is None else f"{too_long.code}: {too_long.message}"

    def _prefill(self, slots: SlotBatch, prefixes: dict[int, list[Prefix]]) -> dict[int, str]:
        """Read prompts together; if that fails, one by one, and return why those fail that fail alone.

        Raises:
            torch.OutOfMemoryError: there is no memory for any one of several: none of them is to blame.
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
        """Read prompts, by slot; the reason if that fails."""
        try:
            # The lanes in the order of the batch, which `some` keeps.
            batch = slots.some(list(prefixes))
            self._drafter.prefill(batch, [prefixes[slot] for slot in batch.ids])
        except FAILURES as error:
            return _reason(error)
        return None


def _reason(error: Exception) -> str:
    """A code and a message. Only words are kept: an exception holds on to memory that was made before it."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"{OUT_OF_MEMORY}: {error}"
    return f"{PROMPT_REFUSED if isinstance(error, PromptError) else DRAFTER_FAILED}: the drafter's side: {error}"
