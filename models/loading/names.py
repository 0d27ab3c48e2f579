"""Check file names from a checkpoint index or a remote store before use."""

from __future__ import annotations

MAX_NAME_BYTES = 255
"""Longest file name that common file systems allow, in bytes."""


def is_plain_name(name: object) -> bool:
    """Return whether a name is a plain file name: no path separators, control characters, `.` or `..`."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES
        and not any(character in "/\\" or ord(character) < 32 for character in name)
    )
