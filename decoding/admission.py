"""Taking requests in: each is looked at, encoded or refused, and requests that say and show the same are encoded once.

Knows requests and what a target's front end makes of them. Does not know slots, rows or what is done with a prompt.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from decoding.errors import PROMPT_REFUSED, context_too_long
from decoding.slots import failed
from decoding.types import Completion, Request, RequestError
from models.content import Content
from models.contract import TargetModel
from models.front_end import PromptError
from models.prefix import Prefix

MAX_PREFILL_TOKENS = 8192
"""Columns of one forward over prompts: enough for any device to be busy, few enough that what a layer makes of them is
small beside weights and memory."""
NUM_AHEAD = 4
"""Forwards' worth of prompts that are encoded before the first of them runs: so that those of one length meet."""


@dataclass(frozen=True)
class Arrivals:
    """Requests whose prompts, `lanes[i]`, may run, and those that were refused. Equal prompts are one object."""

    requests: list[Request] = field(default_factory=list)
    lanes: list[list[Prefix]] = field(default_factory=list)
    refused: list[Completion] = field(default_factory=list)
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
        self.waiting: deque[Request] = deque()

    def take(self, max_requests: int) -> Arrivals:
        """The next waiting requests, in their order: `max_requests`, or fewer once their prompts are `NUM_AHEAD`
        forwards' worth of columns, so that what lies encoded is bounded as well."""
        taken = Arrivals()
        encoded: dict[Content, list[Prefix]] = {}
        num_tokens = 0
        while self.waiting and len(taken.requests) < max_requests:
            if num_tokens >= NUM_AHEAD * self._max_prefill_tokens:
                break
            request = self.waiting.popleft()
            content = content_of(request)
            try:
                self._check(request)
                if content not in encoded:
                    encoded[content] = self._target.encode_lanes(
                        request.prompt, request.images, request.condition, request.videos
                    )
                    num_tokens += sum(lane.length for lane in encoded[content])
            except PromptError as error:
                taken.refused.append(failed(request, RequestError(PROMPT_REFUSED, str(error))))
                continue
            lanes = encoded[content]
            too_long = self.too_long("target", lanes, request)
            if too_long is not None:
                taken.refused.append(failed(request, too_long))
                continue
            taken.requests.append(request)
            taken.lanes.append(lanes)
        return taken

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
