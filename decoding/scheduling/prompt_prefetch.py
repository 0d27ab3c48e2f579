"""Prompts of requests that have no slot yet, begun ahead of their admission by the target's thread for prompts.

Owns which are begun when, and which are forgotten: equal ones are made once, in the order of the requests, and no more
than a given number of columns lies made. Knows requests and their content; not how prompts are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from decoding.types import Request
from models.inputs.content import Content
from models.inputs.prompt_prefetch import PendingPrompt, PreparedPrompt, PromptThread

MAX_UNMADE = 8
"""Prompts that are begun and not made yet: enough for the thread to be busy for some steps."""


class ComingPrompts:
    """Prompts of requests to come, as `make` makes them on `thread`; `content_of` says which are equal.

    None is begun while as many as `max_columns` columns lie made.
    """

    def __init__(
        self,
        thread: PromptThread,
        make: Callable[[Request], PreparedPrompt],
        content_of: Callable[[Request], Content],
        max_columns: int,
    ) -> None:
        self._thread = thread
        self._make = make
        self._content_of = content_of
        self._max_columns = max_columns
        self._coming: dict[Content, PendingPrompt] = {}
        # By the requests themselves, so that their pixels are looked at once. Who is held keeps its number.
        self._known: dict[int, tuple[Request, PendingPrompt]] = {}

    def expect(self, requests: Iterable[Request]) -> None:
        """Begin the prompts of the next requests, which come in this order, and forget those of all others."""
        known: dict[int, tuple[Request, PendingPrompt]] = {}
        wanted: set[PendingPrompt] = set()
        num_unmade = num_columns = 0
        for request in requests:
            coming = self._find(request)
            if coming is None:
                if num_unmade >= MAX_UNMADE or num_columns >= self._max_columns:
                    break
                coming = self._begin(request)
            if coming not in wanted:
                wanted.add(coming)
                columns = coming.num_columns
                num_unmade += columns is None
                num_columns += columns or 0
            known[id(request)] = request, coming
        for content in [content for content, coming in self._coming.items() if coming not in wanted]:
            self._coming.pop(content).cancel()
        self._known = known

    def is_made(self, request: Request) -> bool:
        """Whether a request's prompt can be taken without waiting; it is begun where it was not."""
        return (self._find(request) or self._begin(request)).is_ready

    def take(self, request: Request) -> PreparedPrompt:
        """The prompt of a request that is admitted; waits for it, and raises what making it raised."""
        return (self._find(request) or self._begin(request)).take()

    def _find(self, request: Request) -> PendingPrompt | None:
        known = self._known.get(id(request))
        return self._coming.get(self._content_of(request)) if known is None else known[1]

    def _begin(self, request: Request) -> PendingPrompt:
        coming = self._thread.submit(lambda: self._make(request))
        self._coming[self._content_of(request)] = coming
        return coming
