"""A server of the S3 protocol on loopback that can fail on purpose, and the environment that leads drivers to it.

It starts once per process and costs nothing until it is asked for something. The credentials are canaries: whatever
shows them has leaked them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from werkzeug.serving import make_server

ACCESS_KEY, SECRET_KEY = "AKIACANARYACCESSKEY0", "canary/secret+key/never/to/be/shown/anywhere"
UNAVAILABLE = b"<Error><Code>ServiceUnavailable</Code><Message>try later</Message></Error>"


@dataclass
class Fault:
    """What happens to the next `times` requests of a method whose path holds `path`."""

    kind: str
    """`refuse` (503), `cut` (half a body), `stall` (a few bytes, then nothing), `done` (carried out, then 503)."""
    method: str
    path: str = ""
    times: int = 1


@dataclass
class S3:
    """The server: its faults to come and the requests so far, as (method, path)."""

    faults: list[Fault] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    is_conditional: bool = True
    """Whether `If-None-Match` is honoured; stores that do not know it ignore it."""
    was_outlasted: bool = False
    """Whether a client has waited for a stalled answer until the server gave up."""
    port: int = 0
    _app: Any = None
    _lock: Any = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Listen on a free port of loopback."""
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        server = make_server("127.0.0.1", 0, self, threaded=True)
        self.port = server.server_port
        threading.Thread(target=server.serve_forever, name="s3", daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """What drivers read: where the store is, who asks, and few retries of their own."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ALLOW_HTTP": "true",  # required by Lance's driver
        }

    @contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        """These faults inside the block, none after it."""
        self.faults[:] = faults
        self.was_outlasted = False
        self.released.clear()
        try:
            yield
        finally:
            self.faults.clear()
            self.released.set()

    @contextmanager
    def without_conditional_put(self) -> Iterator[None]:
        """A store that lets an object be created twice, inside the block."""
        self.is_conditional = False
        try:
            yield
        finally:
            self.is_conditional = True

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            self.asked.append((method, path))
            if self._app is None:
                from moto.server import DomainDispatcherApplication, create_backend_app

                self._app = DomainDispatcherApplication(create_backend_app)
            fault = next(
                (fault for fault in self.faults if fault.method == method and fault.path in path and fault.times), None
            )
            if fault is not None:
                fault.times -= 1
        if not self.is_conditional:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if fault is None:
            return self._app(environ, start_response)
        if fault.kind in ("refuse", "done"):
            if fault.kind == "done":
                list(self._app(environ, lambda *_: None))
            start_response("503 Service Unavailable", [("Content-Type", "application/xml")])
            return [b"" if method == "HEAD" else UNAVAILABLE]
        return self._broken_body(environ, start_response, fault.kind)

    def _broken_body(self, environ: dict[str, Any], start_response: Any, kind: str) -> Iterator[bytes]:
        results: list[Any] = []
        body = b"".join(self._app(environ, lambda *what: results.extend(what)))
        start_response(*results[:2])
        yield body[: len(body) // 2]
        if kind == "stall":
            self.was_outlasted = not self.released.wait(30)
        raise ConnectionAbortedError("on purpose")


@cache
def running() -> S3:
    """The process's one server, with its environment set."""
    server = S3()
    server.start()
    os.environ.update(server.environment)
    return server


def make_bucket(name: str) -> Any:
    """A fresh, empty bucket; gives the file system."""
    import s3fs

    filesystem = s3fs.S3FileSystem()
    if filesystem.exists(name):
        filesystem.rm(name, recursive=True)
    filesystem.invalidate_cache()
    filesystem.mkdir(name)
    return filesystem
