"""The retry policy of stores: which errors are transient, and retries with exponential backoff.

Matches the errors of drivers by name, so that none of them has to be installed.
"""

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
    """How often an action is tried; waits in between double, and half of each is random."""

    max_attempts: int = 6
    first_wait_s: float = 0.5
    max_wait_s: float = 20.0

    def wait(self, attempt: int) -> None:
        """Sleep after the failure of this attempt, counted from 0."""
        longest_s = min(self.max_wait_s, self.first_wait_s * 2**attempt)
        time.sleep(longest_s * (0.5 + random.random() / 2))


DEFAULT_POLICY = RetryPolicy()
"""With a driver's own retries: more than a minute of a store that refuses to serve."""

TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)
_TRANSIENT_ERRNO = {
    getattr(errno, name, None)
    for name in (
        *("EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "EIO"),
        *("ENETDOWN", "ENETRESET", "ENETUNREACH", "EPIPE", "EREMOTEIO", "ETIMEDOUT"),
    )
} - {None}
_TRANSIENT_NAMES = {
    *("ClientPayloadError", "ClientConnectionError", "ServerTimeoutError"),  # aiohttp
    *("HTTPClientError", "ResponseStreamingError", "IncompleteReadError", "ResponseParserError"),  # botocore
    *("IncompleteRead", "RemoteDisconnected", "ProtocolError", "HttpError"),  # http.client, urllib3, gcsfs
    *("ServiceRequestError", "ServiceResponseError"),  # azure
    *("ConnectError", "ReadError", "RemoteProtocolError", "TimeoutException"),  # httpx
}


class CutShort(OSError):
    """A file returned fewer bytes than it has."""


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a little later: time-outs, lost connections, 429 and 5xx."""
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
    # Drivers fail while they handle time-outs and raise errors of their own handling.
    cause = error.__cause__ or error.__context__
    return cause is not None and is_transient(cause)


def _status_of(error: BaseException | None) -> int | None:
    """The HTTP status that an error of any driver carries."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None)
    # Lazily, one after the other: some drivers' errors warn when `code` is read.
    candidates = itertools.chain([found], (getattr(error, name, None) for name in ("status", "status_code", "code")))
    return next((status for status in candidates if isinstance(status, int) and 100 <= status < 600), None)


def retried(action: Callable[[], Result], policy: RetryPolicy | None = None) -> Result:
    """The action's result, trying again while it fails transiently; the last failure is raised as it is."""
    policy = policy or DEFAULT_POLICY
    for attempt in range(policy.max_attempts - 1):
        try:
            return action()
        except Exception as error:
            if not is_transient(error):
                raise
        policy.wait(attempt)
    return action()
