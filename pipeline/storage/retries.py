"""Retries store operations after transient errors; errors of drivers are matched by name, as no driver is required."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from pipeline.storage.failures import causes, is_unreachable, status_of, true_error

Result = TypeVar("Result")


@dataclass(frozen=True)
class RetryPolicy:
    """Number of attempts of an action; the wait after each failure doubles, with up to 50 % jitter."""

    max_attempts: int = 6
    first_wait_s: float = 0.5
    max_wait_s: float = 20.0


DEFAULT_POLICY = RetryPolicy()
"""Together with a driver's own retries, this covers more than a minute of an unavailable store."""

TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)
_TRANSIENT_ERRNO = {
    *(errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTDOWN),
    *(errno.EHOSTUNREACH, errno.EIO, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.EPIPE),
    *(errno.ETIMEDOUT, getattr(errno, "EREMOTEIO", errno.EIO)),
}
_TRANSIENT_NAMES = {
    *("ClientPayloadError", "ClientConnectionError", "ServerTimeoutError"),  # aiohttp
    *("HTTPClientError", "ResponseStreamingError", "IncompleteReadError", "ResponseParserError"),  # botocore
    *("IncompleteRead", "RemoteDisconnected", "ProtocolError", "HttpError"),  # http.client, urllib3, gcsfs
    *("ServiceRequestError", "ServiceResponseError"),  # azure
    *("ConnectError", "ReadError", "RemoteProtocolError", "TimeoutException"),  # httpx
}


class CutShort(OSError):
    """A read returned fewer bytes than expected."""


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed: time-outs, lost connections, HTTP status 408, 425, 429 and 5xx."""
    known_by_name = bool({kind.__name__ for kind in type(error).__mro__} & _TRANSIENT_NAMES)
    status = status_of(error)
    if status is None and not known_by_name:  # the cause of a truncated answer may carry an unrelated status
        status = status_of(error.__cause__)
    if status is not None:
        return status in TRANSIENT_STATUS
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError | IsADirectoryError):
        return False
    if known_by_name or isinstance(error, TimeoutError | ConnectionError | CutShort):
        return True
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    if isinstance(error, OSError):
        return error.errno in _TRANSIENT_ERRNO
    # Some drivers raise another error while they handle a time-out.
    cause = error.__cause__ or error.__context__
    return cause is not None and is_transient(cause)


_deadline_s: ContextVar[float | None] = ContextVar("deadline of retries", default=None)
_num_planning = 0


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Do not retry, inside the block, if no connection to a store comes about, in all threads of this process: before a
    job starts, a wrong address is more likely than a store that restarts."""
    global _num_planning
    _num_planning += 1
    try:
        yield
    finally:
        _num_planning -= 1


@contextlib.contextmanager
def until(deadline_s: float) -> Iterator[None]:
    """Start no retry after this time (`time.monotonic`) inside the block, in this thread."""
    token = _deadline_s.set(deadline_s)
    try:
        yield
    finally:
        _deadline_s.reset(token)


def retried(action: Callable[[], Result], policy: RetryPolicy | None = None) -> Result:
    """Run the action and return its result, retrying transient errors; the error of the last attempt is raised.

    If a driver raises FileNotFoundError although a request failed otherwise, the cause is raised.
    """
    policy = policy or DEFAULT_POLICY
    for attempt in range(policy.max_attempts):
        longest_s = min(policy.max_wait_s, policy.first_wait_s * 2**attempt)
        wait_s = longest_s * (0.5 + random.random() / 2)
        try:
            return action()
        except Exception as error:
            failure = true_error(error)
            if attempt + 1 < policy.max_attempts and is_transient(failure) and _may_wait(failure, wait_s):
                pass
            elif failure is error:
                raise
            else:
                raise failure from None
        time.sleep(wait_s)
    raise AssertionError(f"a policy of {policy.max_attempts} attempts")


def _may_wait(failure: BaseException, wait_s: float) -> bool:
    if _num_planning and any(map(is_unreachable, causes(failure))):
        return False
    deadline_s = _deadline_s.get()
    return deadline_s is None or time.monotonic() + wait_s < deadline_s
