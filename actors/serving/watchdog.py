"""Hang detection: ends a process whose engine does not finish a step in time, with a traceback.

Uses `faulthandler`, which does not need the GIL and therefore also ends hangs in native code. One per process.
"""

from __future__ import annotations

import faulthandler
import time

STDERR = 2
REARM_SHARE = 0.1
"""Share of the limit between two restarts of the watchdog, each of which starts a thread."""


class Watchdog:
    """Ends the process (status 1) when `watch` or `rest` is not called again within `limit_s`, or a tenth more."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._armed_s: float | None = None

    def watch(self) -> None:
        """Call before a step."""
        if self._limit_s is None:
            return
        now_s = time.monotonic()
        if self._armed_s is None or now_s - self._armed_s > REARM_SHARE * self._limit_s:
            faulthandler.dump_traceback_later((1 + REARM_SHARE) * self._limit_s, exit=True, file=STDERR)
            self._armed_s = now_s

    def rest(self) -> None:
        """Call when the engine is idle."""
        if self._armed_s is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed_s = None
