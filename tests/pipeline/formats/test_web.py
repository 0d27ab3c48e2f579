"""Fetching from servers that answer byte by byte: one deadline bounds an attempt. Addresses of special purpose."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeline.formats import web
from tests.covering import by_tier

ATTEMPT_S = 1.0
DRIP_S = 0.02
OK = b"HTTP/1.1 200 OK\r\n"
ENDLESS = {
    "status line": (b"", itertools.repeat(b"H")),
    "100 Continue": (b"", itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n")),
    "header name": (OK, itertools.repeat(b"x")),
    "headers": (OK, itertools.cycle([b"a", b":", b"b", b"\r\n"])),
    "body": (OK + b"Content-Length: 1000000\r\n\r\n", itertools.repeat(b"x")),
    "body to the end": (OK + b"Connection: close\r\n\r\n", itertools.repeat(b"x")),
    "chunk size": (OK + b"Transfer-Encoding: chunked\r\n\r\n", itertools.repeat(b"0")),
    "chunk extension": (OK + b"Transfer-Encoding: chunked\r\n\r\n1;", itertools.repeat(b"x")),
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", itertools.repeat(b"1\r\nx\r\n")),
    "trailers": (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", itertools.cycle([b"a", b":", b"b", b"\r\n"])),
}


@contextmanager
def dripping(head: bytes, drops: Iterator[bytes]) -> Iterator[str]:
    """The address of a server that sends `head` at once and then one drop after the other, until the client is gone."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                client = server.accept()[0]
                with client:
                    client.sendall(head)
                    while not over.wait(DRIP_S):
                        client.sendall(next(drops))
            except OSError:
                pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            server.close()
            thread.join()


@pytest.mark.parametrize("part", by_tier(ENDLESS, 3, 9))
def test_one_deadline_bounds_every_part_of_an_answer(part: str) -> None:
    with dripping(*ENDLESS[part]) as host:
        limits = web.FetchLimits(("http",), (host,), 10_000_000, ATTEMPT_S)
        # The parts are endless. The line limits of http.client may end an answer earlier on a fast machine.
        with pytest.raises((TimeoutError, web.http.client.HTTPException)):
            web.fetch(f"http://{host}/picture", limits)


def test_a_handshake_that_drips_ends_at_the_deadline() -> None:
    head = b"\x16\x03\x03\x20\x00"  # a TLS record of 8,192 bytes begins
    with dripping(head, itertools.repeat(b"\x00")) as host:
        limits = web.FetchLimits(("https",), (host,), 10_000_000, ATTEMPT_S)
        with pytest.raises(OSError):
            web.fetch(f"https://{host}/picture", limits)


def test_a_resolver_that_never_answers_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(web.socket, "getaddrinfo", lambda *_, **__: over.wait())
    try:
        with pytest.raises(TimeoutError, match="not resolved in time"):
            web.fetch("http://example.org/picture", web.FetchLimits(("http",), (), 1_000, 0.2))
    finally:
        over.set()


SPECIAL = (
    *("0.0.0.0", "0.255.255.255", "10.0.0.1", "100.64.0.1", "100.127.255.255", "127.0.0.1", "169.254.169.254"),
    *("172.16.0.1", "172.31.255.255", "192.0.0.0", "192.0.0.9", "192.0.0.10", "192.0.0.100", "192.0.0.255"),
    *("192.0.2.1", "192.31.196.1", "192.52.193.1", "192.88.99.1", "192.168.0.1", "192.175.48.1", "198.18.0.1"),
    *("198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("168.63.129.16", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:192.0.0.100", "64:ff9b::10.0.0.1"),
    *("64:ff9b::c000:64", "64:ff9b:1::1", "100::1", "100:0:0:1::1", "2001::1", "2001:db8::1", "2001:20::1"),
    *("2002:7f00:1::", "2002:808:808::", "2620:4f:8000::1", "3fff::1", "5f00::1", "fc00::1", "fd12::1"),
    *("fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1"),
)


@pytest.mark.parametrize("address", SPECIAL)
def test_an_address_of_special_purpose_is_not_public(address: str) -> None:
    assert not web.is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "192.0.1.1", "192.1.0.0", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_other_addresses_are_public(address: str) -> None:
    assert web.is_public(address)
