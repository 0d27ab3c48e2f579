"""Reads the source kind `text`: each non-blank line is one prompt, in the field `text`. Plain, gzip or zstd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from pipeline.formats.kind import Needs, ReadSpec
from pipeline.formats.lines import LineFormat, Record
from pipeline.formats.records import Row

FIELD = "text"


class Text(LineFormat):
    """Parses each line as one text field."""

    name = "text"
    suffixes = (".txt", ".text", ".prompts")

    def select(self, filesystem: Any, root: str, files: pa.Table, needs: Needs) -> None:
        needs.require([FIELD], "a file of lines")

    def parser(self, filesystem: Any, spec: ReadSpec, path: str) -> Callable[[Record], Row]:
        return lambda record: {FIELD: record.text(self.max_bytes)}


KIND = Text().kind
