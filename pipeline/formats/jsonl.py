"""Reads the source kind `jsonl`: a line is a JSON object and one sample; kept columns are text. Plain, gzip or zstd."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import islice
from typing import Any

import pyarrow as pa

from pipeline.formats.kind import Needs, ReadSpec
from pipeline.formats.lines import LineFormat, Record, open_bytes, split_lines
from pipeline.formats.nested import found_in, holders
from pipeline.formats.records import Row
from pipeline.formats.tables import needed_columns
from pipeline.rows.schemas import RowError
from pipeline.storage import access

NUM_PEEKED_ROWS = 100
"""Number of lines that are read to find the columns of a source."""
MAX_PEEKED_BYTES = 32 * 1024 * 1024
"""Bytes of lines after which no further ones are read for that."""
_NAMES = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}


class Jsonl(LineFormat):
    """Parses lines as JSON objects."""

    name = "jsonl"
    suffixes = (".jsonl", ".ndjson")

    def select(self, filesystem: Any, root: str, files: pa.Table, needs: Needs) -> None:
        """Raise ConfigError if a needed column is in no peeked row of the first file with readable rows."""
        for path in map(str, files["path"]) if needs.columns() else ():
            if names := self._peek(filesystem, access.join(root, path), needs.columns()):
                needs.require(names, f"the first {NUM_PEEKED_ROWS} rows of {path}")
                return

    def _peek(self, filesystem: Any, path: str, needed: Collection[str]) -> set[str]:
        """Return the columns of the first `NUM_PEEKED_ROWS` rows, and those of the needed ones that are inside of them;
        empty if no row is an object."""
        names: set[str] = set()
        with suppress(Exception), open_bytes(filesystem, path) as stream:  # the read task reports the error
            records = (record for record in split_lines(stream, self.max_bytes) if not record.is_blank)
            num_bytes = 0
            for record in islice(records, NUM_PEEKED_ROWS):
                with suppress(RowError):
                    names |= found_in(self.parse(record), needed)
                num_bytes += record.num_bytes
                if num_bytes > MAX_PEEKED_BYTES:
                    break
        return names

    def parse(self, record: Record) -> dict[str, Any]:
        """Parse a line as a JSON object; RowError `broken_line` with the line number for anything else."""
        try:
            value = json.loads(record.text(self.max_bytes))
        except (ValueError, RecursionError) as error:
            raise RowError("broken_line", f"line {record.line} is no JSON: {error}") from None
        if not isinstance(value, dict):
            what = _NAMES.get(type(value), "a number")
            raise RowError("broken_line", f"line {record.line} is no JSON object but {what}")
        return value

    def parser(self, filesystem: Any, spec: ReadSpec, path: str) -> Callable[[Record], Row]:
        names = needed_columns(spec)

        def parse(record: Record) -> Row:
            value = self.parse(record)
            return {name: value[name] for name in holders(names, value)}

        return parse


KIND = Jsonl().kind
