"""Admits requests: encodes or refuses waiting requests, in advance if possible; equal prompts are encoded once.

`Refill` decides when free slots are filled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile

from decoding.errors import CONTEXT_TOO_LONG, PROMPT_REFUSED, failed
from decoding.scheduling.queue import RequestQueue
from decoding.types import Completion, Request
from models.backends.rows import SlotRows
from models.contract import TargetModel
from models.inputs.content import Content
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.inputs.prompt_prefetch import Encode, PendingPrompt, PreparedPrompt, Prompt, PromptThread

WINDOW_STEPS = 256
"""Steps over which `Refill` averages the number of ends per step."""
MAX_PREFILL_TOKENS = 8192
"""Prompt tokens of one prefill forward: enough to use the device fully; activations stay small beside the KV cache."""
NUM_ENCODED_FORWARDS = 4
"""Prompts for this many prefill forwards are encoded before the first runs, so that equal lengths can be batched."""
MAX_PREFETCHED = 256
"""Maximum number of requests that prefetch examines per step."""
MAX_WAIT_S = 0.05
"""Seconds for which prompts are waited for after the first, while nothing decodes: about the time of the prefill that
they would need of their own."""
MAX_UNKNOWN = 8
"""Maximum number of prompts that are submitted to the prompt thread before the length of any prompt is known."""


Encoded = list[tuple[Request, PreparedPrompt | PromptError]]
"""Requests with their encoded prompts, or why they are refused."""


@dataclass
class Admitted:
    """Admitted requests with their prompts `lanes[i]` and reserved `pages[i]`, and refused requests. Equal prompts are
    one object.

    `num_feature_hits` is the number of visual features found in the cache, counted once for equal prompts.
    """

    requests: list[Request] = field(default_factory=list)
    lanes: list[list[Prefix]] = field(default_factory=list)
    pages: list[list[list[int]]] = field(default_factory=list)
    refused: list[Completion] = field(default_factory=list)
    num_feature_hits: int = 0
    started_s: float = field(default_factory=time.perf_counter)


class Admission:
    """Takes requests from `queue` for a target with `max_context_tokens` KV positions per sample.

    `max_prefill_tokens` limits the tokens of one prefill forward; a longer prompt runs alone. A request is admitted
    once `rows` have pages for its prompt, its longest output and `num_scratch` positions of a step; it keeps them to
    its end, so that no sample is preempted.
    """

    def __init__(
        self,
        target: TargetModel,
        max_context_tokens: int,
        max_prefill_tokens: int,
        rows: SlotRows,
        num_scratch: int,
    ) -> None:
        if max_prefill_tokens < 1:
            raise ValueError(f"max_prefill_tokens must be at least 1, not {max_prefill_tokens}")
        self.queue = RequestQueue()
        self._target, self._rows, self._num_scratch = target, rows, num_scratch
        # Encoded requests that wait for pages; they are the first ones of the queue.
        self._blocked: Encoded = []
        self._max_context_tokens = max_context_tokens
        self._max_encoded_tokens = NUM_ENCODED_FORWARDS * max_prefill_tokens
        self._prefetcher: PromptPrefetcher | None = None
        if target.prompt_thread is not None:
            self._prefetcher = PromptPrefetcher(target.prompt_thread, target.encode_prompts, self._max_encoded_tokens)

    def expect(self, requests: Iterable[Request]) -> None:
        """Set the requests that will probably be submitted next, to prefetch their prompts."""
        if self._prefetcher is not None:
            self.queue.expect(list(islice(requests, MAX_PREFETCHED)))

    def prefetch(self) -> None:
        """Start encoding the prompts of requests without a slot, if the target has a prompt thread."""
        if self._prefetcher is not None:
            self._prefetcher.prefetch(islice(self.queue.upcoming(), MAX_PREFETCHED))

    def num_ready(self, max_requests: int) -> int:
        """Return how many requests, at most `max_requests`, `take` would admit without waiting for a prompt."""
        if self._blocked:
            request, prompt = self._blocked[0]
            if isinstance(prompt, PreparedPrompt) and not self._rows.has(self._num_positions(prompt, request)):
                return 0
        first = islice(self.queue.waiting(), max_requests)
        ready = first if self._prefetcher is None else takewhile(self._prefetcher.is_ready, first)
        return sum(1 for _ in ready)

    def take(self, max_requests: int, waits: bool = True) -> Admitted:
        """Admit up to `max_requests` waiting requests in order; stop once `NUM_ENCODED_FORWARDS` prefills are encoded.

        With prefetch, stop at the first prompt that is not ready. If `waits`, wait for the first prompt, and at most
        MAX_WAIT_S for further ones.
        """
        taken = Admitted()
        results = self._take_blocked(max_requests)
        if not results:
            encode = self._encode_now if self._prefetcher is None else self._take_prefetched
            results = encode(max_requests, waits)
        distinct: dict[int, PreparedPrompt] = {}
        for number, (request, prompt) in enumerate(results):
            if isinstance(prompt, PromptError):
                taken.refused.append(failed(request.sample_id, PROMPT_REFUSED, str(prompt)))
                continue
            if message := self.too_long("target", prompt.lanes, request):
                taken.refused.append(failed(request.sample_id, CONTEXT_TOO_LONG, message))
                continue
            if (pages := self._rows.take(self._num_positions(prompt, request))) is None:
                for blocked, _ in reversed(results[number:]):
                    self.queue.put_back(blocked)
                self._blocked = results[number:] + self._blocked
                break
            distinct[id(prompt)] = prompt
            taken.requests.append(request)
            taken.lanes.append(prompt.lanes)
            taken.pages.append(pages)
        taken.num_feature_hits = sum(prompt.num_feature_hits for prompt in distinct.values())
        return taken

    def _take_blocked(self, max_requests: int) -> Encoded:
        """Pop the requests that waited for pages, if they are still the first ones."""
        waiting, blocked = self.queue.waiting(), self._blocked[:max_requests]
        self._blocked = self._blocked[max_requests:]
        if [id(request) for request, _ in blocked] != [id(request) for request in islice(waiting, len(blocked))]:
            self._blocked = []
            return []
        return [(self.queue.pop(), prompt) for _, prompt in blocked]

    def _num_positions(self, prompt: PreparedPrompt, request: Request) -> int:
        """Return the KV positions that a row of a sample may write to."""
        return max(lane.length for lane in prompt.lanes) + request.sampling.max_new_tokens + self._num_scratch

    def _encode_now(self, max_requests: int, _waits: bool) -> Encoded:
        """Pop and encode requests, those with images together."""
        popped: list[tuple[Request, Content | PromptError]] = []
        contents: dict[Content, None] = {}

        def distinct() -> Iterator[Prompt]:
            waiting = self.queue.waiting()
            while waiting and len(popped) < max_requests:
                request = self.queue.pop()
                if refusal := self._refusal(request):
                    popped.append((request, refusal))
                    continue
                prompt = prompt_of(request)
                content = prompt.content
                popped.append((request, content))
                if content not in contents:
                    contents[content] = None
                    yield prompt

        results = list(self._target.encode_prompts(distinct(), self._max_encoded_tokens))
        encoded = dict(zip(contents, results, strict=True))
        return [(request, key if isinstance(key, PromptError) else encoded[key]) for request, key in popped]

    def _take_prefetched(self, max_requests: int, waits: bool) -> Encoded:
        """Pop requests as far as their prompts are ready."""
        assert self._prefetcher is not None
        popped: list[tuple[Request, PreparedPrompt | PromptError]] = []
        ends_s = math.inf if waits else 0.0
        distinct: dict[int, int] = {}
        waiting = self.queue.waiting()
        while waiting and len(popped) < max_requests and sum(distinct.values()) < self._max_encoded_tokens:
            if not self._prefetcher.wait(waiting[0], ends_s):
                break
            ends_s = min(ends_s, time.perf_counter() + MAX_WAIT_S)
            request = self.queue.pop()
            prompt = self._refusal(request) or self._prefetcher.take(request)
            popped.append((request, prompt))
            if isinstance(prompt, PreparedPrompt):
                distinct[id(prompt)] = prompt.num_tokens
        return popped

    def _refusal(self, request: Request) -> PromptError | None:
        """Return an error for guidance, output lengths or tokens that the target does not support."""
        sampling, limit = request.sampling, self._target.max_new_tokens
        if sampling.guidance_scale > 1.0 and self._target.num_lanes == 1:
            return PromptError(f"guidance_scale {sampling.guidance_scale} needs a target with an unconditional lane")
        if limit is not None and sampling.max_new_tokens != limit:
            return PromptError(f"an output of this model has {limit} tokens, not {sampling.max_new_tokens}")
        if (token := sampling.max_token_id) >= 0 and token >= self._target.vocab_size:
            names = "bad_words_ids, sequence_bias or forced tokens"
            return PromptError(f"{names} contain {token}, and the target has no such token")
        return None

    def too_long(self, model: str, lanes: list[Prefix], request: Request) -> str:
        """Return a message if the longest prompt plus the output exceed the context window, else an empty string."""
        longest = max((lane.length for lane in lanes), default=0)
        num_new, most = request.sampling.max_new_tokens, self._max_context_tokens
        if longest + num_new <= most:
            return self._rows.refuse(longest + num_new + self._num_scratch) if model == "target" else ""
        return (
            f"the {model}'s prompt has {longest} tokens (images included) and max_new_tokens is {num_new}: together "
            f"more than pool.max_context_tokens ({most})"
        )


def prompt_of(request: Request) -> Prompt:
    """Return what models encode of a request."""
    return Prompt(request.prompt, request.images, request.videos, request.inputs, request.condition)


def content_of(request: Request) -> Content:
    """Return the content key of a request's prompts; requests with equal keys have equal prompts in every model."""
    return prompt_of(request).content


class PromptPrefetcher:
    """Encodes prompts with `encode` on `thread` in advance; requests with equal contents share one prompt.

    Submits no more prompts while those that are submitted have `max_tokens` tokens or more; one that is not encoded yet
    counts the mean of those taken before.
    """

    def __init__(self, thread: PromptThread, encode: Encode, max_tokens: int) -> None:
        self._thread = thread
        self._encode = encode
        self._max_tokens = max_tokens
        self._num_taken = self._taken_tokens = 0
        self._prompts: dict[Content, PendingPrompt] = {}
        # By request identity, so that pixels are hashed once; the reference keeps the id valid.
        self._by_request: dict[int, tuple[Request, PendingPrompt]] = {}

    def prefetch(self, requests: Iterable[Request]) -> None:
        """Submit the prompts of the next requests, in order; cancel or drop the prompts of all other requests."""
        by_request: dict[int, tuple[Request, PendingPrompt]] = {}
        wanted: set[PendingPrompt] = set()
        num_tokens = 0.0
        has_new = False
        for request in requests:
            prompt = self._find(request)
            if prompt not in wanted:
                if num_tokens >= self._max_tokens and (prompt is None or prompt.is_queued):
                    break
                has_new |= prompt is None
                prompt = prompt or self._queue(request)
                wanted.add(prompt)
                num_tokens += self._expected_tokens(request) if prompt.num_columns is None else prompt.num_columns
            by_request[id(request)] = request, prompt
        for content in [content for content, prompt in self._prompts.items() if prompt not in wanted]:
            self._prompts.pop(content).cancel()
        self._by_request = by_request
        if has_new:
            self._thread.start(self._encode)

    def is_ready(self, request: Request) -> bool:
        """Return whether `take` would return without waiting; submit the prompt if needed."""
        return (self._find(request) or self._submit(request)).is_ready

    def wait(self, request: Request, ends_s: float) -> bool:
        """Wait until a request's prompt is encoded, or until `time.perf_counter()` is `ends_s`; return whether `take`
        would return without waiting on the host. If `ends_s` is past, the device must have finished too."""
        remaining_s = ends_s - time.perf_counter()
        if remaining_s <= 0.0:
            return self.is_ready(request)
        return (self._find(request) or self._submit(request)).wait(None if math.isinf(ends_s) else remaining_s)

    def take(self, request: Request) -> PreparedPrompt | PromptError:
        """Wait for a request's prompt and return it, or why it is refused; re-raise other errors of its encoding."""
        try:
            prompt = (self._find(request) or self._submit(request)).take()
        except PromptError as error:
            return error
        self._num_taken += 1
        self._taken_tokens += prompt.num_tokens
        return prompt

    def _expected_tokens(self, request: Request) -> float:
        """Return the tokens that a prompt will probably have, known if its processor ran before."""
        if request.inputs is not None:
            return request.inputs.num_tokens
        return self._taken_tokens / self._num_taken if self._num_taken else self._max_tokens / MAX_UNKNOWN

    def _find(self, request: Request) -> PendingPrompt | None:
        entry = self._by_request.get(id(request))
        return self._prompts.get(content_of(request)) if entry is None else entry[1]

    def _submit(self, request: Request) -> PendingPrompt:
        prompt = self._queue(request)
        self._thread.start(self._encode)
        return prompt

    def _queue(self, request: Request) -> PendingPrompt:
        prompt = prompt_of(request)
        pending = self._prompts[prompt.content] = self._thread.submit(prompt)
        return pending


class Refill:
    """Decides before each step whether free slots are refilled; with `prefill_steps` 0 they are whenever one is free.

    A prefill stops all rows that decode, and an empty slot is a loss too. On a GPU the prefill of a few prompts takes
    as long as several decoding steps, whatever their number, because it launches every kernel of the decoder. Merging
    the prefills of k slots saves k − 1 of them and leaves slots empty meanwhile. With S slots, λ ends per step and
    prefills that take as long as s steps, the loss is least at k = √(2 λ s S), the economic order quantity (Harris
    1913). Times are not measured, so that batches do not depend on the machine's load.
    A request waits at most 2 · `prefill_steps` · `num_slots` steps for a free slot.
    """

    def __init__(self, num_slots: int, prefill_steps: float) -> None:
        self._num_slots = self._num_free = num_slots
        self._limit = prefill_steps * num_slots
        self._lost = 0
        self._num_steps = 0
        self._ends_per_step = 0.0

    def is_due(self, num_free: int, num_ready: int, has_active: bool) -> bool:
        """Return whether to fill free slots with the `num_ready` requests that can be admitted before the next step; at
        once if nothing decodes (`has_active`)."""
        self._num_steps = min(self._num_steps + 1, WINDOW_STEPS)
        self._ends_per_step += (max(0, num_free - self._num_free) - self._ends_per_step) / self._num_steps
        self._num_free = num_free
        num_fillable = min(num_free, num_ready)
        if num_fillable == 0:
            return False
        self._lost += num_fillable
        best = min(self._num_slots, round(math.sqrt(2.0 * self._ends_per_step * self._limit)))
        return not has_active or num_fillable >= best or self._lost >= 2.0 * self._limit

    def done(self, num_free: int) -> None:
        """Note that slots were filled, and `num_free` are left."""
        self._lost, self._num_free = 0, num_free
