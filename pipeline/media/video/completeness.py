"""Checks whether a file has all that its container's headers promise."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable

CHUNK_ID = re.compile(rb"[0-9A-Za-z ]{4}")
LISTS = (b"movi", b"rec ")
HEAD_BYTES = 4096
"""Bytes of a file within which the headers below begin."""
SEGMENT = b"\x18\x53\x80\x67"
"""Id of a Matroska file's segment."""
FLV_SIZE = b"\0\x08filesize\0"
"""Key of a number of 64 bits in the metadata of FLV; 0 in recordings."""
ASF_PROPERTIES = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
"""GUID of an ASF file's properties."""


def riff_damage(path: str) -> int | None:
    """Return the byte of an AVI file at which its chunks end early or are no chunks; None if it is whole.

    A file above 1 GB has several RIFF chunks. Chunks of samples are those of the lists `movi` and `rec `.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        offset, ends = 0, [size]
        while offset < size:
            while offset >= ends[-1] and len(ends) > 1:
                ends.pop()
            file.seek(offset)
            head = file.read(12)
            name, length = head[:4], int.from_bytes(head[4:8], "little")
            if len(ends) == 1 and name != b"RIFF":
                return None  # what follows is no part of the video
            end = offset + 8 + length
            if not CHUNK_ID.fullmatch(name) or end > min(ends[-1], size):
                is_cut = name == b"RIFF" or head[8:12] in LISTS
                if not is_cut or offset + 12 > size:
                    return offset
                end = size
                ends[0] = size + 1  # its chunks are checked up to the end of the file, which is too early
            if name == b"RIFF" or (name == b"LIST" and head[8:12] in LISTS):
                ends.append(end)
                offset += 12
            else:
                offset = end + length % 2
        return None if ends[0] == size else size


def promised_s(path: str, formats: list[str], duration_s: float | None) -> float | None:
    """Return the length that the header promises if the file lacks bytes that it promises too, for Matroska, FLV and
    ASF; `duration_s` is the demuxer's. None for whole files, and headers that promise nothing, as of recordings."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEAD_BYTES)
    checks: dict[str, Callable[[bytes, int], bool]] = {"matroska": _lacks_segment, "flv": _lacks_tags}
    for name, lacks_bytes in checks.items():
        if name in formats:
            return duration_s if lacks_bytes(head, size) else None
    return _asf_promise(head, size) if "asf" in formats else None


def _lacks_segment(head: bytes, size: int) -> bool:
    """Return whether a Matroska file lacks bytes of its segment; one of unknown size lacks none."""
    at = head.find(SEGMENT) + len(SEGMENT)
    if at < len(SEGMENT) or at >= len(head) or not head[at]:
        return False
    width = 9 - head[at].bit_length()
    length = int.from_bytes(head[at : at + width], "big") - (1 << 7 * width)
    return length != (1 << 7 * width) - 1 and at + width + length > size


def _lacks_tags(head: bytes, size: int) -> bool:
    """Return whether an FLV file is smaller than the size in its metadata."""
    at = head.find(FLV_SIZE) + len(FLV_SIZE)
    value = head[at : at + 8]
    return at >= len(FLV_SIZE) and len(value) == 8 and struct.unpack(">d", value)[0] > size


def _asf_promise(head: bytes, size: int) -> float | None:
    """Return the length of an ASF file that is smaller than the size in its properties, and no broadcast."""
    at = head.find(ASF_PROPERTIES) + 40
    if at < 40 or len(head) < at + 52:
        return None
    promised_bytes, _, _, play_100_ns, _, preroll_ms, flags = struct.unpack_from("<6QI", head, at)
    return None if flags & 1 or promised_bytes <= size else play_100_ns / 1e7 - preroll_ms / 1e3
