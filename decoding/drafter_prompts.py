"""The drafter's side of prompts: made once for equal ones, refused where they do not fit, and read before it drafts.

What reading takes is kept for the controller, who may be spared it by not drafting. Knows nothing of steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from decoding.admission import Admission
from decoding.contracts import Drafter, Probe
from decoding.controller import Reading
from decoding.errors import PROMPT_REFUSED
from decoding.slots import Progress
from decoding.types import Request, RequestError
from models.front_end import PromptError
from models.lanes import SlotBatch
from models.prefix import Prefix


class DrafterPrompts:
    """Prompts of one engine's samples as its drafter sees them.

    `is_timed` says that somebody decides by what reading takes: the device is then waited for, which it was a moment
    before anyway, for the first tokens of the same samples.
    """

    def __init__(self, drafter: Drafter, admission: Admission, device: torch.device, is_timed: bool) -> None:
        self._drafter = drafter
        self._admission = admission
        self._waits = is_timed and device.type != "cpu"
        self._device = device
        self._num_read, self._read_s = 0, 0.0

    def of(self, request: Request, probe: Probe) -> list[Prefix] | RequestError:
        """The prompts of this request, and of all of equal content; an error where the drafter cannot have them."""
        try:
            return self._drafter.prefixes(request, probe)
        except PromptError as error:
            return RequestError(PROMPT_REFUSED, f"the drafter's side: {error}")

    def fitting(self, request: Request, lanes: list[Prefix] | RequestError) -> list[Prefix] | RequestError:
        """The prompts where they fit beside the output that this request wants."""
        if isinstance(lanes, RequestError):
            return lanes
        return self._admission.too_long("drafter", lanes, request) or lanes

    def read(self, slots: SlotBatch, progress: Sequence[Progress]) -> float:
        """Have the drafter read what it has not read of these samples' prompts; returns the seconds that it took.

        Those whose prompts were read share the time in their telemetry; each counts all forwards, as it was in them.
        """
        unread = [one for one in progress if one.num_unread]
        if not unread:
            return 0.0
        start, forwards_before = time.perf_counter(), self._drafter.num_forwards
        self._drafter.prefill(slots)
        if self._waits:
            torch.accelerator.synchronize(self._device)
        spent = time.perf_counter() - start
        self._num_read += sum(one.num_unread for one in unread)
        self._read_s += spent
        for one in unread:
            one.num_unread = 0
            one.stats.prefill_ms += 1000 * spent / len(unread)
            one.stats.drafter_forwards += self._drafter.num_forwards - forwards_before
        return spent

    def take_reading(self) -> Reading:
        """What was read since this was asked last."""
        reading = Reading(self._num_read, self._read_s)
        self._num_read, self._read_s = 0, 0.0
        return reading
