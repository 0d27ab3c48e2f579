"""Splits a file of JSON into values without parsing it: the values of an array, or values one after the other. Reads
the file block by block, so that its size has no limit, and so that reading can begin at any value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.encodings import PrefixedStream
from pipeline.formats.kind import Entry
from pipeline.formats.lines import BOM, CHUNK_BYTES, Record

MAX_KEY_BYTES = 256
"""Maximum bytes of a key that is searched, and of white space behind it."""
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_IS_READ = np.isin(np.arange(256), list(b'[]{},"\\'))
_COMMA, _QUOTE, _BACKSLASH, _ARRAY = b',"\\['


class _Structure:
    """Finds brackets and commas outside of strings in the blocks of a text, from `depth` open brackets on."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_in_string = self._is_escaped = False

    def scan(self, block: bytes) -> tuple[NDArray[np.intp], NDArray[np.uint8], NDArray[np.intp]]:
        """Return the positions of the next block's brackets and commas, these bytes, and the depth behind each."""
        content = np.frombuffer(block, np.uint8)
        places = np.flatnonzero(_IS_READ[content])
        chars = content[places]
        quotes = places[chars == _QUOTE]
        if self._is_escaped or b"\\" in block:
            quotes = np.setdiff1d(quotes, self._escaped(places[chars == _BACKSLASH], len(block)), assume_unique=True)
        places = places[(chars != _QUOTE) & (chars != _BACKSLASH)]
        is_inside = (np.searchsorted(quotes, places) + self._is_in_string) % 2 == 1
        places = places[~is_inside]
        chars = content[places]
        depths = self._depth + np.cumsum(_STEPS[chars], dtype=np.intp)
        self._is_in_string ^= len(quotes) % 2 == 1
        self._depth = int(depths[-1]) if len(depths) else self._depth
        return places, chars, depths

    def _escaped(self, backslashes: NDArray[np.intp], num_bytes: int) -> NDArray[np.intp]:
        """Return the positions behind an odd number of backslashes."""
        escaped = [np.zeros(int(self._is_escaped), np.intp)]
        if self._is_escaped:
            backslashes = backslashes[backslashes != 0]
        if len(backslashes):
            is_last = np.append(np.diff(backslashes) != 1, True)
            lasts = np.flatnonzero(is_last)
            escaped.append(backslashes[lasts[np.diff(lasts, prepend=-1) % 2 == 1]] + 1)
        found = np.concatenate(escaped)
        self._is_escaped = bool(len(found)) and int(found[-1]) == num_bytes
        return found


class Array(NamedTuple):
    """The stream behind the bracket that begins an array, at this position."""

    stream: Any
    entry: Entry


def find_array(stream: Any, key: str) -> Array:
    """Find the array of a key of the object that a stream holds; ValueError if there is none."""
    structure, before, position, line = _Structure(), b"", 0, 1
    pattern = re.compile(rb'"%s"\s*:\s*' % re.escape(key.encode()))
    while block := stream.read(CHUNK_BYTES):
        places, chars, depths = structure.scan(block)
        for place in places[(chars == _ARRAY) & (depths == 2)].tolist():
            context = (before if place < MAX_KEY_BYTES else b"") + block[max(0, place - MAX_KEY_BYTES) : place]
            if any(match.end() == len(context) for match in pattern.finditer(context)):
                line += block.count(b"\n", 0, place)
                return Array(PrefixedStream(block[place + 1 :], stream), Entry(0, position + place + 1, line))
        line += block.count(b"\n")
        position += len(block)
        before = (before + block)[-MAX_KEY_BYTES:]
    raise ValueError(f"the file is no JSON object with a list {key!r}")


class _Value:
    """Collects the bytes of a value, and those of the white space, brackets and commas around it."""

    def __init__(self, entry: Entry, max_bytes: int) -> None:
        self._position, self._line, self._max_bytes = entry.offset, entry.line, max_bytes
        self._parts: list[bytes] = []
        self._num_bytes = self._num_lines = self._num_text_bytes = 0
        self.begin = entry
        """Where the value begins."""

    def skip(self, part: bytes) -> None:
        """Add bytes that are no part of the value."""
        self._num_bytes += len(part)
        self._num_lines += part.count(b"\n")

    def add(self, part: bytes) -> None:
        """Add bytes of the value; white space before it is skipped."""
        text = part if self._num_text_bytes else part.lstrip()
        self.skip(part[: len(part) - len(text)])
        if not self._num_text_bytes:
            self.begin = Entry(0, self._position + self._num_bytes, self._line + self._num_lines)
        self._num_text_bytes += len(text)
        self._parts = [*self._parts, text] if self._num_text_bytes <= self._max_bytes else []
        self.skip(text)

    def close(self) -> Record:
        """Return the value as a record, and begin the next one."""
        data = b"".join(self._parts).removeprefix(BOM) if self._num_text_bytes <= self._max_bytes else None
        record = Record(self.begin.line, data, self._num_bytes, self._num_lines, self.begin.offset)
        self._position, self._line = self._position + self._num_bytes, self._line + self._num_lines
        self._parts, self._num_bytes, self._num_lines, self._num_text_bytes = [], 0, 0, 0
        return record


def split_array(stream: Any, entry: Entry, depth: int, max_bytes: int) -> Iterator[Record]:
    """Yield the values of an array inside of `depth` brackets as records. `entry` is the position of the stream: the
    beginning of a file, or behind the bracket or comma before a value. A value of more than `max_bytes` has the content
    None. ValueError if the file ends before the array does, or has more than white space behind its only array."""
    structure, value = _Structure(depth if entry.offset else 0), _Value(entry, max_bytes)
    has_begun = entry.offset > 0
    while block := stream.read(CHUNK_BYTES):
        places, chars, depths = structure.scan(block)
        start = 0
        if not has_begun and len(places):
            has_begun, start = True, int(places[0]) + 1
            value.skip(block[:start])
        is_end = ((chars == _COMMA) & (depths == depth)) | (depths < depth)
        for place, is_last in zip(places[is_end].tolist(), (depths[is_end] < depth).tolist(), strict=True):
            value.add(block[start:place])
            value.skip(block[place : place + 1])
            start = place + 1
            yield value.close()
            if is_last:
                if depth == 1:
                    _check_rest(block[start:], stream)
                return
        (value.add if has_begun else value.skip)(block[start:])
    where = f"byte {value.begin.offset} (line {value.begin.line})"
    raise ValueError(f"the file ends inside the value at {where}, or its brackets do not match")


def _check_rest(block: bytes, stream: Any) -> None:
    while not block.strip():
        if not (block := stream.read(CHUNK_BYTES)):
            return
    raise ValueError("there is more behind the end of the array: several arrays in one file, or a bracket too many")


def split_sequence(stream: Any, entry: Entry, max_bytes: int) -> Iterator[Record]:
    """Yield values of JSON that follow each other, as `split_array` does; what cannot be split is one record."""
    structure, value = _Structure(), _Value(entry, max_bytes)
    while block := stream.read(CHUNK_BYTES):
        places, chars, depths = structure.scan(block)
        start = 0
        for place in places[(depths <= 0) & (_STEPS[chars] < 0)].tolist():
            value.add(block[start : place + 1])
            start = place + 1
            yield value.close()
        value.add(block[start:])
    yield value.close()
