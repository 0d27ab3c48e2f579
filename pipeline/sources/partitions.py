"""Hive partitions: columns in a file's path as `name=value` folders."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import unquote

NULL = "__HIVE_DEFAULT_PARTITION__"


@lru_cache(maxsize=1024)
def partition_values(path: str) -> dict[str, str | None]:
    """The columns of a path relative to the source root; values are text, and the inner folder wins."""
    values: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        name, equals, value = folder.partition("=")
        if name and equals:
            values[unquote(name)] = None if value == NULL else unquote(value)
    return values
