"""Reads the source kind `jsonl`: a line is a JSON object and one sample; kept columns are text. Plain, gzip or zstd."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any

import pyarrow as pa

from configs.load import ConfigError
from pipeline.formats.kind import Entry, Needs, ReadSpec
from pipeline.formats.lines import BOM, LineFormat, Record, open_bytes, read_head
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
    suffixes: tuple[str, ...] = (".jsonl", ".ndjson")
    other_suffixes: tuple[str, ...] = (".json",)

    added_names: frozenset[str] = frozenset()
    """Columns that rows have besides the keys of their objects."""

    def select(self, filesystem: Any, root: str, files: pa.Table, needs: Needs) -> None:
        """Raise ConfigError if a needed column is in no peeked row of the first file with readable rows."""
        for path in map(str, files["path"]) if needs.columns() else ():
            if names := self._peek(filesystem, access.join(root, path), needs):
                needs.require(names | self.added_names, f"the first {NUM_PEEKED_ROWS} rows of {path}")
                return

    def check(self, filesystem: Any, path: str, needs: Needs, name: str) -> None:
        """Raise ConfigError for a file that is an array, of which no line is an object."""
        text = b""
        with suppress(Exception), open_bytes(filesystem, path) as stream:  # the read task reports the error
            text = read_head(stream).removeprefix(BOM).lstrip()
        first, _, others = text.partition(b"\n")
        if first.startswith(b"[") and not (first.rstrip().endswith(b"]") and others.strip()):
            raise ConfigError(f"source.kind: {name} is a JSON array; source.kind 'json' reads these")

    def _peek(self, filesystem: Any, path: str, needs: Needs) -> set[str]:
        """Return the columns of the first `NUM_PEEKED_ROWS` rows, and those of the needed ones that are inside of them;
        empty if no row is an object."""
        names: set[str] = set()
        needed, dialect = needs.columns(), self.dialect(filesystem, needs.source, path)
        with suppress(Exception), open_bytes(filesystem, path) as stream:  # the read task reports the error
            records = (record for record in self.records(stream, dialect, Entry()) if not record.is_blank)
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
            raise RowError("broken_line", f"{record.name} is no JSON: {error}") from None
        if not isinstance(value, dict):
            what = _NAMES.get(type(value), "a number")
            raise RowError("broken_line", f"{record.name} is no JSON object but {what}")
        return value

    def parser(self, filesystem: Any, spec: ReadSpec, path: str) -> Callable[[Record], Row]:
        names = needed_columns(spec)

        def parse(record: Record) -> Row:
            value = self.parse(record)
            return {name: value[name] for name in holders(names, value)}

        return parse


KIND = Jsonl().kind
