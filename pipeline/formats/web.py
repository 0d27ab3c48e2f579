"""Fetches untrusted HTTP and HTTPS URLs: on every redirect, the host must be public or named in the job file, and the
connection uses a checked address. Bytes and redirects are limited, and one deadline covers an attempt from name
resolution to the last byte."""

from __future__ import annotations

import http.client
import io
import ipaddress
import socket
import ssl
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from pipeline.storage.retries import CutShort

MAX_REDIRECTS = 5
CHUNK_BYTES = 64 * 1024
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SPECIAL_PURPOSE = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16"),
        *("192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        *("64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001:db8::/32", "2002::/16"),
        *("2620:4f:8000::/48", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
        "168.63.129.16/32",
    )
)
"""The IANA special-purpose address registries (IPv4 and IPv6), multicast and reserved ranges, and Azure's host
address. Python's `ipaddress` uses older editions of these registries."""
_HEADERS = {"User-Agent": "draftfleet", "Accept": "*/*", "Accept-Encoding": "identity"}
_SAFE = "/%:@!$&'()*+,;=~"


class Refused(Exception):
    """A URL may not be fetched because of its scheme, its host's address, or too many redirects."""


class StatusError(OSError):
    """The server answered with a status other than 200 or a redirect; `status` is the code."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered {status}")
        self.status = status


class TooLarge(Exception):
    """The body exceeds the byte limit."""


@dataclass(frozen=True)
class FetchLimits:
    """Limits of a fetch: schemes, hosts that may be private, bytes, and seconds per attempt including redirects."""

    schemes: tuple[str, ...]
    private_hosts: tuple[str, ...]
    max_bytes: int
    timeout_s: float


def fetch(url: str, limits: FetchLimits) -> bytes:
    """Fetch the body of a URL in one attempt; raises Refused, TooLarge, StatusError, OSError or HTTPException."""
    deadline = time.monotonic() + limits.timeout_s
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked(url, limits)
        target = quote(parts.path or "/", safe=_SAFE)
        if parts.query:
            target += "?" + quote(parts.query, safe=_SAFE + "?-._[]|")
        with ExitStack() as stack:
            connection = stack.enter_context(closing(_connect(parts, limits, deadline)))
            connection.request("GET", target, headers=_HEADERS)
            # The response owns the socket if the server closes the connection.
            response = stack.enter_context(closing(connection.getresponse()))
            if response.status == 200:
                return _body(response, limits.max_bytes)
            if response.status not in (301, 302, 303, 307, 308):
                raise StatusError(response.status)
            url = urljoin(url, response.headers.get("Location") or "")
    raise Refused(f"more than {MAX_REDIRECTS} redirects")


def _checked(url: str, limits: FetchLimits) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises ValueError if the port is no number
    except ValueError:
        raise Refused("it is no URL") from None
    if parts.scheme not in ("http", "https") or parts.scheme not in limits.schemes:
        raise Refused(f"{parts.scheme or 'no scheme'!r} is not in source.uri_schemes")
    if not parts.hostname:
        raise Refused("it names no host")
    return parts


def _connect(parts: SplitResult, limits: FetchLimits, deadline: float) -> http.client.HTTPConnection:
    """Connect to a checked address of the host; its addresses are tried in the resolver's order."""
    host = parts.hostname
    assert host
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = _resolve(host, port, deadline)
    names = {host.lower().rstrip("."), f"{host.lower().rstrip('.')}:{port}"}
    is_named = not names.isdisjoint(map(str.lower, limits.private_hosts))
    if not is_named and not all(map(is_public, addresses)):
        raise Refused("its host is on a private network; name it in source.fetch.private_hosts to allow it")
    failure: OSError = OSError("the host has no address")
    for address in addresses:
        try:
            plain = socket.create_connection((address, port), timeout=_seconds_left(deadline))
        except OSError as error:
            failure = error
            continue
        connection = http.client.HTTPConnection(host, port)
        try:
            if parts.scheme == "https":
                connection = http.client.HTTPSConnection(host, port, context=_tls())
                plain.settimeout(_seconds_left(deadline))  # bounds the whole handshake, not each of its reads
                plain = _tls().wrap_socket(plain, server_hostname=host)
        except BaseException:
            plain.close()
            raise
        connection.sock = _BoundedSocket(plain, deadline)
        return connection
    raise failure


def _resolve(host: str, port: int, deadline: float) -> list[str]:
    """Resolve a host to its addresses, in the resolver's order, in a thread, because the resolver has no timeout."""
    addresses: list[str] = []
    failure: list[Exception] = []

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses.extend(dict.fromkeys(str(answer[4][0]) for answer in answers))
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_seconds_left(deadline))
    if thread.is_alive():
        raise TimeoutError("the name of its host is not resolved in time")
    if failure and isinstance(failure[0], UnicodeError):
        raise Refused("its host is no name") from None
    if failure:
        raise failure[0]
    return addresses


class _BoundedSocket(io.RawIOBase):
    """A socket for `http.client`, and the file that it reads, with one deadline, also for slow single bytes."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__()
        self._sock, self._deadline = sock, deadline
        self._file = sock.makefile("rb", buffering=0)

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(_seconds_left(self._deadline))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_BoundedSocket(self._sock, self._deadline))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_seconds_left(self._deadline))
        return self._file.readinto(buffer) or 0

    def close(self) -> None:
        self._file.close()
        self._sock.close()  # takes effect when all files of the socket are closed
        super().close()


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def is_public(address: str) -> bool:
    """Return whether an address is public; IPv4-mapped and NAT64 IPv6 addresses are checked as IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(ip.packed[12:])))
    return ip.is_global and not ip.is_reserved and not any(ip in network for network in _SPECIAL_PURPOSE)


def _body(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    expected = response.length
    if expected is not None and expected > max_bytes:
        raise TooLarge
    data = bytearray()
    while chunk := response.read1(CHUNK_BYTES):
        data += chunk
        if len(data) > max_bytes:
            raise TooLarge
    if expected is not None and len(data) < expected:
        raise CutShort(f"received {len(data)} of {expected} bytes")
    return bytes(data)


def _seconds_left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it takes too long")
    return left_s
