"""Retries store operations after transient errors; errors of drivers are matched by name, as no driver is required."""

from __future__ import annotations

import errno
import itertools
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

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
    status = _status_of(error)
    if status is None and not known_by_name:  # the cause of a truncated answer may carry an unrelated status
        status = _status_of(error.__cause__)
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


def _status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status in a driver's error; None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None)
    # Evaluated lazily: some drivers' errors warn when `code` is read.
    candidates = itertools.chain([found], (getattr(error, name, None) for name in ("status", "status_code", "code")))
    return next((status for status in candidates if isinstance(status, int) and 100 <= status < 600), None)


def retried(action: Callable[[], Result], policy: RetryPolicy | None = None) -> Result:
    """Run the action and return its result, retrying transient errors; the error of the last attempt is raised."""
    policy = policy or DEFAULT_POLICY
    for attempt in range(policy.max_attempts - 1):
        try:
            return action()
        except Exception as error:
            if not is_transient(error):
                raise
        longest_s = min(policy.max_wait_s, policy.first_wait_s * 2**attempt)
        time.sleep(longest_s * (0.5 + random.random() / 2))
    return action()
