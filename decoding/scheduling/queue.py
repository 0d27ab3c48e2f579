"""Keeps the queue of waiting and running requests, from which policies admit the next request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import chain
from typing import Protocol

from decoding.types import Request


class RequestGroup(Enum):
    """Groups of waiting requests; each group is first in, first out."""

    NEW = "new"
    RETRY = "retry"
    """Requests interrupted by a failed engine; they run before new requests."""
    ALONE = "alone"
    """Requests that run one at a time, to isolate a failure."""
    PLAIN = "plain"
    """Requests that run without a drafter."""
    SUSPECT = "suspect"
    """Requests that were running when a process died."""


class AdmissionPolicy(Protocol):
    """Interface that decides when new requests may start."""

    def may_start(self) -> bool: ...

    def on_start(self, request: Request) -> None: ...


class RequestQueue:
    """Queue of waiting and running requests. `running` maps unique sample ids to started requests, in start order.

    `policy` admits requests of the group NEW; None admits all. `num_waiting` counts the waiting requests of all groups.
    """

    def __init__(self, policy: AdmissionPolicy | None = None) -> None:
        self.running: dict[str, Request] = {}
        self.num_waiting = 0
        self._policy = policy
        self._groups: dict[RequestGroup, deque[Request]] = {group: deque() for group in RequestGroup}
        self._expected: Iterable[Request] = ()

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running requests."""
        return self.num_waiting + len(self.running)

    @property
    def num_started(self) -> int:
        """Number of unfinished requests that are not in the group NEW."""
        return self.num_unfinished - len(self._groups[RequestGroup.NEW])

    @property
    def unfinished(self) -> list[Request]:
        """Running requests, then waiting ones."""
        order = (RequestGroup.ALONE, RequestGroup.SUSPECT, RequestGroup.PLAIN, RequestGroup.RETRY, RequestGroup.NEW)
        return [*self.running.values(), *chain.from_iterable(self._groups[group] for group in order)]

    def waiting(self, group: RequestGroup = RequestGroup.NEW) -> deque[Request]:
        """Return the waiting requests of one group; callers must not modify it."""
        return self._groups[group]

    def submit(self, request: Request, group: RequestGroup = RequestGroup.NEW) -> None:
        self._groups[group].append(request)
        self.num_waiting += 1

    def requeue(self, requests: Iterable[Request], group: RequestGroup, front: bool = False) -> None:
        """Move running requests to the end of a group, or to its front, in the given order."""
        for request in reversed(list(requests)) if front else list(requests):
            del self.running[request.sample_id]
            (self._groups[group].appendleft if front else self._groups[group].append)(request)
            self.num_waiting += 1

    def restart(self) -> None:
        """Move all started requests to the front of the group NEW."""
        unfinished = self.unfinished
        for group in self._groups.values():
            group.clear()
        self.running.clear()
        self._groups[RequestGroup.NEW].extend(unfinished)
        self.num_waiting = len(unfinished)

    def expect(self, requests: Iterable[Request]) -> None:
        """Set the requests that will probably be submitted next, in order. They may never be submitted."""
        self._expected = requests

    def upcoming(self) -> Iterator[Request]:
        """Yield the requests that will probably start next, in order: ALONE, RETRY, NEW, then expected requests."""
        yield from self._groups[RequestGroup.ALONE]
        yield from self._groups[RequestGroup.RETRY]
        if self._policy is None or self._policy.may_start():
            yield from self._groups[RequestGroup.NEW]
            yield from self._expected

    def pop(self, group: RequestGroup = RequestGroup.NEW) -> Request:
        """Remove the first waiting request of a group without recording it as running."""
        self.num_waiting -= 1
        return self._groups[group].popleft()

    def put_back(self, request: Request) -> None:
        """Return a request of `pop` to the front of the group NEW."""
        self.num_waiting += 1
        self._groups[RequestGroup.NEW].appendleft(request)

    def start(self, group: RequestGroup) -> Request | None:
        """Move the first request of a group to `running`; None if the group is empty or the policy refuses."""
        if not self._groups[group]:
            return None
        if group is RequestGroup.NEW and self._policy is not None and not self._policy.may_start():
            return None
        request = self.pop(group)
        self.running[request.sample_id] = request
        if group is RequestGroup.NEW and self._policy is not None:
            self._policy.on_start(request)
        return request

    def finish(self, sample_id: str) -> None:
        del self.running[sample_id]
