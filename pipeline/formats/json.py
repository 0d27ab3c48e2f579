"""Reads the source kind `json`: arrays of objects, of which each is a sample, as LLaVA and ShareGPT publish them.

A file that begins with an object has objects one after the other: JSON lines, or one object over several lines. Plain,
gzip or zstd. Arrays are split without parsing them, so a file may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from configs.source import SourceConfig
from pipeline.formats.encodings import PrefixedStream
from pipeline.formats.json_values import split_array, split_sequence
from pipeline.formats.jsonl import Jsonl
from pipeline.formats.kind import Entry, Needs
from pipeline.formats.lines import BOM, Record, open_bytes, read_head, split_lines
from pipeline.rows.schemas import RowError

ARRAY, LINES, SEQUENCE = "array", "lines", "sequence"
NUM_SAMPLED_LINES = 2
"""Number of lines of which one is an object by itself in a file of JSON lines."""


class Json(Jsonl):
    """Parses the values of an array, or values one after the other, as JSON objects."""

    name = "json"
    suffixes = (".json",)
    other_suffixes = ()

    def dialect(self, filesystem: Any, source: SourceConfig, path: str) -> str:
        """Return how the values of a file are separated, from its first lines."""
        with suppress(Exception), open_bytes(filesystem, path) as stream:  # the read task reports the error
            head = read_head(stream)
            if head.removeprefix(BOM).lstrip().startswith(b"["):
                return ARRAY
            lines = split_lines(PrefixedStream(head, stream), self.max_bytes)
            for line in islice((line for line in lines if not line.is_blank), NUM_SAMPLED_LINES):
                with suppress(RowError):
                    self.parse(line)
                    return LINES
        return SEQUENCE

    def check(self, filesystem: Any, path: str, needs: Needs, name: str) -> None:
        """Arrays are read."""

    def splits(self, path: str) -> bool:
        """Return False: whether a byte is inside of a string depends on all bytes before."""
        return False

    def records(self, stream: Any, dialect: str, entry: Entry, cut: int | None = None) -> Iterator[Record]:
        if dialect == ARRAY:
            return split_array(stream, entry, 1, self.max_bytes)
        if dialect == SEQUENCE:
            return split_sequence(stream, entry, self.max_bytes)
        return super().records(stream, dialect, entry, cut)


KIND = Json().kind
