"""Asks stores for the first time, before a job starts: in bounded time, and refused with a clear reason."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from fsspec import get_filesystem_class

from configs.load import ConfigError
from pipeline.storage import access
from pipeline.storage.failures import STORES, explain
from pipeline.storage.retries import retried, until

Result = TypeVar("Result")

FIRST_TOUCH_S = 6.0
"""Longest time of the first request to a store, with its driver's search for credentials and its retries. Starting
Python takes a few seconds more."""
CONNECT_S = 3.0
"""Longest time to resolve a store's name and to connect to it, of `FIRST_TOUCH_S`."""
_PORTS = {"http": 80, "https": 443}
_LOGGERS = ("asyncio", "azure", "fsspec", "gcsfs", "google", "s3fs")
"""Loggers of drivers, which print tracebacks of errors that the drivers raise as well."""
_ADDRESSES: dict[tuple[str, ...], Callable[[Any], str]] = {
    ("s3", "s3a"): lambda filesystem: filesystem.s3.meta.endpoint_url,
    ("az", "abfs", "abfss"): lambda filesystem: filesystem.service_client.url,
}
"""The address of a store that its driver has, by schemes."""


def check_stores(dotted: str, urls: Iterable[str]) -> None:
    """Ask every store of the URLs, which the field `dotted` names, for one of them; whether it exists is not checked.
    Local paths are skipped.

    Raises:
        ConfigError: a store has no driver, does not answer in `FIRST_TOUCH_S`, refuses the credentials, or lacks the
            bucket.
    """
    by_store: dict[str, str] = {}
    for url in urls:
        if access.uri_scheme(url) in STORES:
            by_store.setdefault("/".join(url.split("/", 3)[:3]), url)
    for url in by_store.values():
        _check_store(dotted, url)


def _check_store(dotted: str, url: str) -> None:
    loggers = {logging.getLogger(name): logging.getLogger(name).level for name in _LOGGERS}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        bounded(lambda: _ask(dotted, url), FIRST_TOUCH_S)
    except ConfigError:
        raise
    except Exception as error:  # drivers raise errors of no common class
        raise access.refusal(dotted, url, error) from None
    for logger, level in loggers.items():  # not after a failure: the driver may go on in its thread
        logger.setLevel(level)


def bounded(action: Callable[[], Result], limit_s: float) -> Result:
    """Run `action` in a thread of its own, and return its result or raise its error; TimeoutError after `limit_s`
    seconds, when the thread is left alone."""
    results: list[Result] = []
    failures: list[Exception] = []
    deadline_s = time.monotonic() + limit_s

    def run() -> None:
        try:
            with until(deadline_s):
                results.append(action())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError(f"no answer in {limit_s:g} s")
    return results[0]


def _ask(dotted: str, url: str) -> None:
    get_filesystem_class(access.uri_scheme(url))  # ImportError without the driver
    if address := _known_address(url):  # before the driver looks for credentials, for which some take long
        connect(address)
    filesystem, path = access.open_url(url, dotted)
    address = _address_of(filesystem, url)
    _find_credentials(filesystem)
    if address:
        connect(address)
    asks = [filesystem.info]
    if access.uri_scheme(url) in ("s3", "s3a"):
        asks.append(filesystem.ls)  # the answer to a HEAD request has no reason, that to a listing does
    for ask in asks:
        try:
            retried(partial(ask, path))
        except FileNotFoundError as error:
            if explain(error, url):  # it is the bucket that does not exist
                raise
        except OSError:
            if ask is not asks[-1]:
                continue
            raise
        return


def _known_address(url: str) -> str:
    """Return the URL of a server that the environment determines; empty if its driver does."""
    scheme = access.uri_scheme(url)
    if scheme in ("gs", "gcs"):
        return os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
    if scheme == "hf":
        return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return url if scheme in _PORTS else ""


def _find_credentials(filesystem: Any) -> None:
    """Raise botocore's NoCredentialsError if the client of S3 has found none, before it fails to connect."""
    find = getattr(getattr(filesystem, "_s3", None), "_get_credentials", None)
    if find is not None and not filesystem.anon and find() is None:
        from botocore.exceptions import NoCredentialsError  # type: ignore[import-untyped]

        raise NoCredentialsError


def _address_of(filesystem: Any, url: str) -> str:
    """Return the URL of the server of an opened store; empty if the driver does not have it."""
    find = next((find for schemes, find in _ADDRESSES.items() if access.uri_scheme(url) in schemes), None)
    try:
        return "" if find is None else str(find(filesystem))
    except AttributeError:  # another version of the driver
        return ""


def connect(address: str) -> None:
    """Connect to the server of an HTTP URL and close the connection; OSError with `host` and `port` if that fails in
    `CONNECT_S`. A proxy of the environment is not asked."""
    parts = urllib.parse.urlsplit(address)
    host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    if host is None or port is None or parts.scheme in urllib.request.getproxies():
        return
    try:
        # The resolver has no time limit of its own.
        bounded(lambda: socket.create_connection((host, port), CONNECT_S).close(), CONNECT_S)
    except OSError as error:
        error.host, error.port = host, port  # type: ignore[attr-defined]
        raise
