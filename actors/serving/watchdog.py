"""Hang detection: a process whose engine does not come back from a step in time is ended, with a trace of where it was.

Uses the interpreter's own watchdog thread, which needs no lock of Python's: it also ends a process that hangs inside
native code. One per process. Knows nothing of engines.
"""

from __future__ import annotations

import faulthandler
import time

STDERR = 2
REARM_SHARE = 0.1
"""Of the limit; starting the watchdog costs a thread, so it is not done in every one of a thousand steps a second."""


class Watchdog:
    """Ends the process (status 1) when `watch` or `rest` is not called again within `limit_s`, or a tenth more."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._armed_s: float | None = None

    def watch(self) -> None:
        """A step begins."""
        if self._limit_s is None:
            return
        now_s = time.monotonic()
        if self._armed_s is None or now_s - self._armed_s > REARM_SHARE * self._limit_s:
            faulthandler.dump_traceback_later((1 + REARM_SHARE) * self._limit_s, exit=True, file=STDERR)
            self._armed_s = now_s

    def rest(self) -> None:
        """No step is under way."""
        if self._armed_s is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed_s = None
