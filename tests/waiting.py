"""The one way in which tests wait for another process or thread that cannot notify them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from threading import Event
from typing import TypeVar

PATIENCE_S = 900.0
"""Longest wait of a failing test."""
POLL_S = 0.02
Found = TypeVar("Found")


def until(
    look: Callable[[], Found],
    reason: Callable[[], str] = lambda: "nothing was found",
    process: subprocess.Popen[bytes] | None = None,
) -> Found:
    """The first true value of `look`; fails with `reason` after `PATIENCE_S` of waiting, or when `process` ends."""
    pause = Event()
    for _ in range(int(PATIENCE_S / POLL_S)):
        has_ended = process is not None and process.poll() is not None
        if value := look():
            return value
        if has_ended:
            break
        pause.wait(POLL_S)
    raise AssertionError(reason())
