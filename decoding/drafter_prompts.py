"""The drafter's side of prompts: made when they are first drafted for, once for equal ones; refused or read.

Whoever never drafts for a sample is spared all of it, the drafter's look at its images included. What it takes is kept
for the controller. Knows nothing of steps.
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

    def read(self, slots: SlotBatch, progress: Sequence[Progress]) -> tuple[float, dict[int, RequestError]]:
        """Have the drafter read what it has not read of these samples' prompts; the seconds that it took, and by slot
        why it cannot read one.

        Those whose prompts were read share the time in their telemetry; each counts all forwards, as it was in them.
        """
        unread = [(slot, one) for slot, one in zip(slots.ids, progress, strict=True) if one.unread is not None]
        if not unread:
            return 0.0, {}
        start, forwards_before = time.perf_counter(), self._drafter.num_forwards
        made: dict[int, list[Prefix] | RequestError] = {}
        prefixes: dict[int, list[Prefix]] = {}
        refused: dict[int, RequestError] = {}
        for slot, one in unread:
            probe, one.unread = one.unread, None
            assert probe is not None
            # Samples of one prompt have one probe, and one prompt in the drafter too.
            if id(probe) not in made:
                made[id(probe)] = self._make(one.request, probe)
            found = self._fitting(one.request, made[id(probe)])
            if isinstance(found, RequestError):
                refused[slot] = found
            else:
                prefixes[slot] = found
        if prefixes:
            self._drafter.prefill(slots.some(list(prefixes)), list(prefixes.values()))
        if self._waits:
            torch.accelerator.synchronize(self._device)
        spent = time.perf_counter() - start
        self._num_read += sum(one.prefix_length for _, one in unread)
        self._read_s += spent
        for _, one in unread:
            one.stats.prefill_ms += 1000 * spent / len(unread)
            one.stats.drafter_forwards += self._drafter.num_forwards - forwards_before
        return spent, refused

    def take_reading(self) -> Reading:
        """What was read since this was asked last."""
        reading = Reading(self._num_read, self._read_s)
        self._num_read, self._read_s = 0, 0.0
        return reading

    def _make(self, request: Request, probe: Probe) -> list[Prefix] | RequestError:
        """The prompts of this request, and of all of equal content."""
        try:
            return self._drafter.prefixes(request, probe)
        except PromptError as error:
            return RequestError(PROMPT_REFUSED, f"the drafter's side: {error}")

    def _fitting(self, request: Request, lanes: list[Prefix] | RequestError) -> list[Prefix] | RequestError:
        """The prompts where they fit beside the output that this request wants."""
        if isinstance(lanes, RequestError):
            return lanes
        return self._admission.too_long("drafter", lanes, request) or lanes
