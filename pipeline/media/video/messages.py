"""Messages between the decoding process and its supervisor: JSON headers, each followed by bytes.

No pickle: a process that has read hostile files can only return data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

MAX_HEADER_BYTES = 16 * 1024 * 1024
LENGTH = struct.Struct(">I")


def pack(header: dict[str, Any], num_bytes: int = 0) -> bytes:
    """The start of a message; `num_bytes` of payload have to follow."""
    text = json.dumps(header | {"num_bytes": num_bytes}).encode()
    return LENGTH.pack(len(text)) + text


def receive(
    read: Callable[[int], bytes | bytearray], read_payload: Callable[[int], Any] | None = None
) -> tuple[dict[str, Any], Any]:
    """One message; `read(n)` returns exactly n bytes, and so does `read_payload` for the bytes after the header.

    Raises:
        EOFError: the other process is gone.
        ValueError: the message is invalid.
    """
    (length,) = LENGTH.unpack(read(LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(read(length))
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return header, (read_payload or read)(int(header.pop("num_bytes")))
