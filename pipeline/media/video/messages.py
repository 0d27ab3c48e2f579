"""Packs and receives messages of the decoding process: JSON and raw bytes, no pickle, as it may be compromised."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

MAX_HEADER_BYTES = 16 * 1024 * 1024
LENGTH = struct.Struct(">I")


def pack(header: dict[str, Any], num_bytes: int = 0) -> bytes:
    """Return the header of a message; the caller then sends `num_bytes` bytes of payload."""
    text = json.dumps(header | {"num_bytes": num_bytes}).encode()
    return LENGTH.pack(len(text)) + text


def receive(
    read: Callable[[int], bytes | bytearray], read_payload: Callable[[int], Any] | None = None
) -> tuple[dict[str, Any], Any]:
    """Receive a message as (header, payload); `read(n)` and `read_payload(n)` must return exactly n bytes, or raise
    EOFError if the other process has exited. ValueError for an invalid message."""
    (length,) = LENGTH.unpack(read(LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(read(length))
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return header, (read_payload or read)(int(header.pop("num_bytes")))
