"""Checks whether a file has all bytes that its container's headers promise."""

from __future__ import annotations

import os

SEGMENT, SEGMENT_BYTES = b"\x18\x53\x80\x67", 4096
"""Id of a Matroska file's segment, which begins within the first bytes."""


def has_all_of_riff(path: str) -> bool:
    """Return whether the file has all bytes of its RIFF chunks, of which an AVI file above 1 GB has several."""
    offset = 0
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while offset < size:
            file.seek(offset)
            head = file.read(8)
            if head[:4] != b"RIFF":
                break
            length = int.from_bytes(head[4:], "little")
            offset += 8 + length + length % 2
            if length < 4 or offset > size + 1:
                return False
    return True


def has_all_of_segment(path: str) -> bool:
    """Return whether a Matroska file has all bytes of its segment, or one of unknown size."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(SEGMENT_BYTES)
    at = head.find(SEGMENT) + len(SEGMENT)
    if at < len(SEGMENT) or at >= len(head) or not head[at]:
        return True
    width = 9 - head[at].bit_length()
    length = int.from_bytes(head[at : at + width], "big") - (1 << 7 * width)
    return length == (1 << 7 * width) - 1 or at + width + length <= size
