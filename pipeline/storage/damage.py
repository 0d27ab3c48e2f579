"""Recognises damaged files of an output: JSON records, and the records of attempts."""

from __future__ import annotations

import errno
import json
from typing import Any

from configs.load import ConfigError

NO_FILE_ERRNOS = frozenset({errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENXIO, errno.ENOTDIR})
"""Errors of a path at which there is no regular file of a usual size; others are errors of the store."""


_RECORD = {"attempt": int, "config_fingerprint": str, "content": dict, "config": dict, "limit": int}
"""Types of the values that are read of an attempt's record, if they are not null."""


class DamagedFile(ConfigError):
    """Raised for a file of an output with other content than a job has written. `relative` is its path and `reason` the
    problem; the message has the `advice` after them."""

    def __init__(self, location: str, relative: str, reason: str, advice: str = "") -> None:
        self.relative, self.reason = relative, reason
        super().__init__(f"sink.path: {location} is damaged: {reason}" + (f"; {advice}" if advice else ""))


def parse_json(data: bytes) -> Any:
    """Parse JSON; ValueError, with the reason, if it is none."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from None


def problem_of_record(record: Any, relative: str) -> str:
    """Return why a value is not the record of the attempt in the file `relative`; empty if it is."""
    if not isinstance(record, dict):
        return "it is no JSON object"
    for name, kind in _RECORD.items():
        value = record.get(name)
        if value is not None and type(value) is not kind:
            return f"{name!r} is {value!r:.50}"
    number = relative.rpartition("/")[2].removesuffix(".json")
    if record.get("attempt", int(number)) != int(number):
        return f"it is the record of attempt {record['attempt']}"
    if record.get("limit") is not None and record["limit"] < 1:
        return f"'limit' is {record['limit']}"
    return ""
