"""Taking requests in: each is looked at, encoded or refused, and requests that say and show the same are encoded once.

Knows requests and what a target's front end makes of them. Does not know slots, rows or what is done with a prompt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from decoding.errors import PROMPT_REFUSED, context_too_long
from decoding.scheduling.prompt_prefetch import ComingPrompts
from decoding.scheduling.slots import failed
from decoding.types import Completion, Request, RequestError
from models.contract import TargetModel
from models.inputs.content import Content
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.inputs.prompt_prefetch import PreparedPrompt

MAX_PREFILL_TOKENS = 8192
"""Columns of one forward over prompts: enough for any device to be busy, few enough that what a layer makes of them is
small beside weights and memory."""
NUM_AHEAD = 4
"""Forwards' worth of prompts that are encoded before the first of them runs: so that those of one length meet."""
MAX_EXPECTED = 256
"""Requests to come that are looked at in a step, however few prompts they have."""


@dataclass
class Arrivals:
    """Requests whose prompts, `lanes[i]`, may run, and those that were refused. Equal prompts are one object.

    `num_feature_hits` counts visual features that were in memory, once for equal prompts.
    """

    requests: list[Request] = field(default_factory=list)
    lanes: list[list[Prefix]] = field(default_factory=list)
    refused: list[Completion] = field(default_factory=list)
    num_feature_hits: int = 0
    started_s: float = field(default_factory=time.perf_counter)


class Admission:
    """The queue in front of the slots of a target whose samples have `max_context_tokens` columns at most.

    `max_prefill_tokens` bounds the columns of one forward over prompts; a longer prompt runs alone.
    """

    def __init__(self, target: TargetModel, max_context_tokens: int, max_prefill_tokens: int) -> None:
        if max_prefill_tokens < 1:
            raise ValueError(f"max_prefill_tokens must be at least 1, not {max_prefill_tokens}")
        self._target = target
        self._max_context_tokens = max_context_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._expected: list[Request] = []
        self._coming: ComingPrompts | None = None
        if target.prompt_thread is not None:
            num_columns = NUM_AHEAD * max_prefill_tokens
            self._coming = ComingPrompts(target.prompt_thread, self._make, content_of, num_columns)
        self.waiting: deque[Request] = deque()

    def expect(self, requests: Iterable[Request]) -> None:
        """Take note of the next requests that will be queued, in their order, until others are named."""
        if self._coming is not None:
            self._expected = list(islice(requests, MAX_EXPECTED))

    def make_ahead(self) -> None:
        """Have the prompts of requests without a slot begun, where the target has a thread for them."""
        if self._coming is not None:
            self._coming.expect(islice(chain(self.waiting, self._expected), MAX_EXPECTED))

    def take(self, max_requests: int, waits: bool = True) -> Arrivals:
        """The next waiting requests, in their order: `max_requests`, or fewer once their prompts are `NUM_AHEAD`
        forwards' worth of columns, so that what lies encoded is bounded as well.

        Where prompts are made ahead, only those whose turn has come and whose prompt is made: nobody who is there
        waits for one that is not. If there is nobody (`waits`), the first one is waited for.
        """
        taken = Arrivals()
        encoded: dict[Content, PreparedPrompt] = {}
        num_tokens = 0
        while self.waiting and len(taken.requests) < max_requests:
            if num_tokens >= NUM_AHEAD * self._max_prefill_tokens:
                break
            may_wait = waits and not (taken.requests or taken.refused)
            if self._coming is not None and not may_wait and not self._coming.is_made(self.waiting[0]):
                break
            request = self.waiting.popleft()
            content = content_of(request)
            try:
                self._check(request)
                if content not in encoded:
                    made = self._make(request) if self._coming is None else self._coming.take(request)
                    encoded[content] = made
                    num_tokens += sum(lane.length for lane in made.lanes)
                    taken.num_feature_hits += made.num_feature_hits
            except PromptError as error:
                taken.refused.append(failed(request, RequestError(PROMPT_REFUSED, str(error))))
                continue
            lanes = encoded[content].lanes
            too_long = self.too_long("target", lanes, request)
            if too_long is not None:
                taken.refused.append(failed(request, too_long))
                continue
            taken.requests.append(request)
            taken.lanes.append(lanes)
        return taken

    def _make(self, request: Request) -> PreparedPrompt:
        hits_before = self._target.num_feature_hits
        lanes = self._target.encode_lanes(request.prompt, request.images, request.condition, request.videos)
        return PreparedPrompt(lanes, self._target.num_feature_hits - hits_before)

    def _check(self, request: Request) -> None:
        """Refuse what the target has no lanes or no places for."""
        sampling, limit = request.sampling, self._target.max_new_tokens
        if sampling.guidance_scale > 1.0 and self._target.num_lanes == 1:
            raise PromptError(f"guidance_scale {sampling.guidance_scale} needs a target with an unconditional lane")
        if limit is not None and sampling.max_new_tokens != limit:
            raise PromptError(f"an output of this model has {limit} tokens, not {sampling.max_new_tokens}")

    def too_long(self, who: str, lanes: list[Prefix], request: Request) -> RequestError | None:
        """Why the longest of these prompts does not fit beside the request's output; None where all do."""
        longest = max((lane.length for lane in lanes), default=0)
        num_new = request.sampling.max_new_tokens
        if longest <= self._max_context_tokens - num_new:
            return None
        return context_too_long(who, longest, num_new, self._max_context_tokens)


def content_of(request: Request) -> Content:
    """What a request's prompts are made of, in every model: requests of equal content get equal prompts."""
    condition = request.condition
    ready = condition if isinstance(condition, np.ndarray) else None
    # True equals 1 as a key, and a class is no truth value.
    label = (request.prompt, type(condition), None if ready is not None else condition)
    shown = Content.shown(request.images, request.videos, label)
    return shown if ready is None else Content([ready], shown)
