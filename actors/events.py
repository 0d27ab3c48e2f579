"""Writes job events as JSON lines to standard error: time, level, event, job, attempt and values.

Values are truncated, and credentials in URLs are masked.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

import pyarrow as pa

from actors.results import Stamp

MAX_TEXT_CHARS = 2000
_USER = re.compile(r"(://)[^/?#\s@]+@")
_QUERY_SECRET = re.compile(r"([?&][^=&\s]*(?:sig|token|secret|passw|credential|key)[^=&\s]*=)[^&\s\"']+", re.IGNORECASE)


@dataclass(frozen=True)
class Events:
    """Emits events of one attempt of a job if `enabled`. Serialisable."""

    stamp: Stamp
    enabled: bool

    def emit(self, event: str, level: str = "info", stream: TextIO | None = None, **values: Any) -> None:
        """Write one line; errors of the stream are ignored."""
        if not self.enabled:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "event": event,
            "job_id": self.stamp.job_id,
            "attempt": self.stamp.attempt,
            "process": os.getpid(),
            **{name: _safe(value) for name, value in values.items()},
        }
        stream = stream or sys.stderr
        try:
            stream.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            stream.flush()
        except (OSError, ValueError):
            return

    def batch(self, result: pa.Table) -> None:
        """Emit one event per failed row, and one for the batch."""
        if not self.enabled:
            return
        names = ("sample_id", "error_type", "error_message")
        for sample_id, code, message in zip(*(result.column(name).to_pylist() for name in names), strict=True):
            if code:
                self.emit("row_failed", "warning", sample_id=sample_id, code=code, message=message)
        num_tokens = sum(result.column("num_generated_tokens").to_pylist())
        self.emit("batch_done", num_rows=result.num_rows, num_tokens=num_tokens)


def _safe(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    masked = _QUERY_SECRET.sub(r"\1***", _USER.sub(r"\1***@", value))
    return masked if len(masked) <= MAX_TEXT_CHARS else masked[: MAX_TEXT_CHARS - 3] + "..."
