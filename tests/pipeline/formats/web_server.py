"""A web server on loopback that serves, stalls, cuts, redirects and counts, each by its path."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

BODY = b"picture" * 100


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        self.server.asked[self.path] += 1
        self.server.headers[self.path] = dict(self.headers)
        self.close_connection = True
        kind, _, rest = self.path.lstrip("/").partition("/")
        getattr(self, f"_{kind}")(rest)

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body) if length is None else length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _ok(self, rest: str) -> None:
        self._answer(200, BODY)

    def _file(self, rest: str) -> None:
        """One of the server's files, or the part of it that is asked for."""
        body = self.server.files.get(unquote(rest))
        if body is None:
            return self._answer(404)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self._answer(200, body, **{"Accept-Ranges": "bytes"})
        start, stop = int(asked[1]), min(int(asked[2] or len(body)) + 1, len(body))
        part = {"Content-Range": f"bytes {start}-{stop - 1}/{len(body)}"}
        return self._answer(206, body[start:stop], **part)

    def _status(self, rest: str) -> None:
        self._answer(int(rest))

    def _later(self, rest: str) -> None:
        """503 as often as the path requests, then the body."""
        self._answer(*((503,) if self.server.asked[self.path] <= int(rest) else (200, BODY)))

    def _cut(self, rest: str) -> None:
        """Half of the body as often as the path requests, then all of it."""
        short = self.server.asked[self.path] <= int(rest)
        self._answer(200, BODY[: len(BODY) // 2] if short else BODY, len(BODY))

    def _to(self, rest: str) -> None:
        self._answer(302, Location=rest)

    def _loop(self, rest: str) -> None:
        self._answer(301, Location=f"/loop/{rest}x")

    def _claims(self, rest: str) -> None:
        """Claims many bytes and sends none."""
        self._answer(200, b"", int(rest))

    def _endless(self, rest: str) -> None:
        """Sends without a length until the client disconnects."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            while True:
                self.wfile.write(BODY)
        except OSError:
            pass

    def _stalls(self, rest: str) -> None:
        """A few bytes, and then nothing until the server goes."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[:10])
        self.wfile.flush()
        self.server.over.wait()

    def log_message(self, *_: object) -> None:
        pass


class WebServer(ThreadingHTTPServer):
    """Counts what was asked, by path."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: Counter[str] = Counter()
        self.headers: dict[str, dict[str, str]] = {}
        self.files: dict[str, bytes] = {}
        """The content of `/file/<path>`."""
        self.over = threading.Event()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def running() -> Iterator[WebServer]:
    """The server on a free port, for as long as the block runs."""
    with WebServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
