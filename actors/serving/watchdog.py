"""Ends a process that hangs, also in native code, so that Ray replaces it."""

from __future__ import annotations

import faulthandler
import time

STDERR = 2
REARM_SHARE = 0.1
"""Minimum time between two restarts of the watchdog timer, as a share of its limit; each restart starts a thread."""


class Watchdog:
    """Ends the process (status 1) with a traceback if `watch` or `rest` is not called again within `limit_s`.

    `faulthandler` needs no GIL, so that hangs in native code are detected as well. A process has one watchdog.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._armed_s: float | None = None

    def watch(self) -> None:
        """Start or restart the timer; call before each step of the work."""
        if self._limit_s is None:
            return
        now_s = time.monotonic()
        if self._armed_s is None or now_s - self._armed_s > REARM_SHARE * self._limit_s:
            faulthandler.dump_traceback_later((1 + REARM_SHARE) * self._limit_s, exit=True, file=STDERR)
            self._armed_s = now_s

    def rest(self) -> None:
        """Stop the timer; call when there is no work."""
        if self._armed_s is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed_s = None
