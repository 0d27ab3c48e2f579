"""Fetching over http and https without being led astray: addresses are checked before a connection, on every redirect.

A URI inside a row may come from anybody. So a host has to be public, or named by the job file; the address that was
checked is the one that is connected to; time, bytes and redirects are bounded. Knows no row.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from pipeline.patience import CutShort

MAX_REDIRECTS = 5
CHUNK_BYTES = 64 * 1024
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PUBLIC_ONLY_IN_NAME = frozenset({"168.63.129.16"})
"""Addresses of a cloud's inside that no registry lists as private: Azure's host."""
_HEADERS = {"User-Agent": "draftfleet", "Accept": "*/*", "Accept-Encoding": "identity"}


class Refused(Exception):
    """A URL that may not be fetched: its scheme, its host's address, or a redirect."""


class StatusError(OSError):
    """The server answered with an error; `status` is its code."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered {status}")
        self.status = status


class TooLarge(Exception):
    """The body has more bytes than are wanted."""


@dataclass(frozen=True)
class Limits:
    """What a fetch may do: schemes, hosts that may be private, bytes, and seconds of an attempt, redirects included."""

    schemes: tuple[str, ...]
    private_hosts: tuple[str, ...]
    max_bytes: int
    timeout_s: float


def fetch(url: str, limits: Limits) -> bytes:
    """The body of a URL, in one attempt.

    Raises:
        Refused, TooLarge, StatusError, OSError, http.client.HTTPException: see each.
    """
    deadline = time.monotonic() + limits.timeout_s
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked(url, limits)
        connection = _connect(parts, limits, deadline)
        response: http.client.HTTPResponse | None = None
        try:
            target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (f"?{_query(parts)}" if parts.query else "")
            connection.request("GET", target, headers=_HEADERS)
            response = connection.getresponse()
            if response.status in (301, 302, 303, 307, 308):
                url = urljoin(url, response.headers.get("Location") or "")
                continue
            if response.status != 200:
                raise StatusError(response.status)
            return _body(connection, response, limits.max_bytes, deadline)
        finally:
            if response is not None:
                response.close()  # it keeps the socket where the server ends the connection
            connection.close()
    raise Refused(f"more than {MAX_REDIRECTS} redirects")


def _query(parts: SplitResult) -> str:
    return quote(parts.query, safe="/?%:@!$&'()*+,;=~-._[]|")


def _checked(url: str, limits: Limits) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises for what is no number
    except ValueError:
        raise Refused("it is no URL") from None
    if parts.scheme not in ("http", "https") or parts.scheme not in limits.schemes:
        raise Refused(f"{parts.scheme or 'no scheme'!r} is not in source.uri_schemes")
    if not parts.hostname:
        raise Refused("it names no host")
    return parts


def _connect(parts: SplitResult, limits: Limits, deadline: float) -> http.client.HTTPConnection:
    """A connection to an address of the host that has been checked; several are tried in the resolver's order."""
    assert parts.hostname
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise Refused("its host is no name") from None
    addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    if not _is_named(parts.hostname, port, limits.private_hosts):
        for address in addresses:
            if not is_public(address):
                raise Refused("its host is on a private network; name it in source.fetch.private_hosts to allow it")
    failure: OSError = OSError("the host has no address")
    for address in addresses:
        try:
            plain = socket.create_connection((address, port), timeout=_left(deadline))
        except OSError as error:
            failure = error
            continue
        try:
            if parts.scheme == "http":
                connection = http.client.HTTPConnection(parts.hostname, port)
                connection.sock = plain
            else:
                connection = http.client.HTTPSConnection(parts.hostname, port, context=_tls())
                connection.sock = _tls().wrap_socket(plain, server_hostname=parts.hostname)
        except BaseException:
            plain.close()
            raise
        return connection
    raise failure


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _is_named(host: str, port: int, names: tuple[str, ...]) -> bool:
    host = host.lower().rstrip(".")
    return any(name.lower() in (host, f"{host}:{port}") for name in names)


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, also inside what maps IPv4 into IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in _NAT64 or ip.packed[:12] == bytes(12):
            inner.append(ipaddress.IPv4Address(ip.packed[12:]))
        if any(one is not None and not is_public(str(one)) for one in inner):
            return False
        if ip.ipv4_mapped is not None or ip in _NAT64:
            return True
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and str(ip) not in _PUBLIC_ONLY_IN_NAME


def _body(
    connection: http.client.HTTPConnection, response: http.client.HTTPResponse, max_bytes: int, deadline: float
) -> bytes:
    if response.length is not None and response.length > max_bytes:
        raise TooLarge
    expected = response.length
    parts: list[bytes] = []
    size = 0
    while True:
        _set_timeout(connection, response, _left(deadline))
        chunk = response.read1(CHUNK_BYTES)
        if not chunk:
            break
        parts.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            raise TooLarge
    if expected is not None and size < expected:
        raise CutShort(f"{size} bytes came of {expected}")
    return b"".join(parts)


def _set_timeout(connection: http.client.HTTPConnection, response: http.client.HTTPResponse, left_s: float) -> None:
    """Bound the next read; a response that closes its connection keeps the socket for itself."""
    sock = connection.sock or getattr(getattr(response.fp, "raw", None), "_sock", None)
    if sock is not None:
        sock.settimeout(left_s)


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it takes too long")
    return left_s
