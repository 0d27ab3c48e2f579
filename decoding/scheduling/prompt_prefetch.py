"""Prefetches prompts: encodes the prompts of queued requests on the target's prompt thread before admission."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from decoding.types import Request
from models.inputs.content import Content
from models.inputs.prompt_prefetch import PendingPrompt, PreparedPrompt, PromptThread

MAX_PENDING = 8
"""Maximum number of submitted prompts that are not encoded yet; enough to keep the thread busy for several steps."""


class PromptPrefetcher:
    """Encodes prompts with `encode` on `thread` in advance; requests with equal `content_of` share one prompt.

    Submits no more prompts while the encoded prompts have `max_columns` tokens or more.
    """

    def __init__(
        self,
        thread: PromptThread,
        encode: Callable[[Request], PreparedPrompt],
        content_of: Callable[[Request], Content],
        max_columns: int,
    ) -> None:
        self._thread = thread
        self._encode = encode
        self._content_of = content_of
        self._max_columns = max_columns
        self._prompts: dict[Content, PendingPrompt] = {}
        # By request identity, so that pixels are hashed once; the reference keeps the id valid.
        self._by_request: dict[int, tuple[Request, PendingPrompt]] = {}

    def prefetch(self, requests: Iterable[Request]) -> None:
        """Submit the prompts of the next requests, in order; cancel or drop the prompts of all other requests."""
        by_request: dict[int, tuple[Request, PendingPrompt]] = {}
        wanted: set[PendingPrompt] = set()
        num_pending = num_columns = 0
        for request in requests:
            prompt = self._find(request)
            if prompt is None:
                if num_pending >= MAX_PENDING or num_columns >= self._max_columns:
                    break
                prompt = self._submit(request)
            if prompt not in wanted:
                wanted.add(prompt)
                columns = prompt.num_columns
                num_pending += columns is None
                num_columns += columns or 0
            by_request[id(request)] = request, prompt
        for content in [content for content, prompt in self._prompts.items() if prompt not in wanted]:
            self._prompts.pop(content).cancel()
        self._by_request = by_request

    def is_ready(self, request: Request) -> bool:
        """Return whether `take` would return without waiting; submit the prompt if needed."""
        return (self._find(request) or self._submit(request)).is_ready

    def take(self, request: Request) -> PreparedPrompt:
        """Wait for a request's prompt and return it; re-raise the exception of its encoding."""
        return (self._find(request) or self._submit(request)).take()

    def _find(self, request: Request) -> PendingPrompt | None:
        entry = self._by_request.get(id(request))
        return self._prompts.get(self._content_of(request)) if entry is None else entry[1]

    def _submit(self, request: Request) -> PendingPrompt:
        prompt = self._thread.submit(lambda: self._encode(request))
        self._prompts[self._content_of(request)] = prompt
        return prompt
