"""Shuts a job down on SIGTERM and SIGINT, after its finished rows are written.

The first signal raises `KeyboardInterrupt` in the main thread; the job's context managers then write finished rows and
stop Ray. A second signal, or the end of the grace period, exits the process immediately.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 25.0
"""Maximum time from the first signal to the exit of the process; below Kubernetes' default of 30 s."""
CLUSTER_WAIT_S = 30
"""Minimum time that a cluster must leave between SIGTERM and SIGKILL; longer than the grace period."""


@dataclass
class Stop:
    """The signal that ends the process, if one was received."""

    number: int | None = None

    @property
    def status(self) -> int:
        """The exit status as in shells: 128 plus the signal's number."""
        assert self.number is not None, "no signal came"
        return 128 + self.number

    @property
    def name(self) -> str:
        assert self.number is not None, "no signal came"
        return signal.Signals(self.number).name


_active: list[Stop] = []


@contextlib.contextmanager
def catch_signals(grace_s: float = GRACE_S) -> Iterator[Stop]:
    """Turn the first SIGTERM or SIGINT in the block into `KeyboardInterrupt`; yield the `Stop` that records it."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    timers: list[threading.Timer] = []

    def handle(number: int, _: FrameType | None) -> None:
        if stop.number is not None:
            _end_at_once(number, "a second signal came")
        stop.number = number
        timer = threading.Timer(grace_s, _end_at_once, (number, f"the grace period of {grace_s:g} s is over"))
        timer.daemon = True
        timer.start()
        timers.append(timer)
        raise KeyboardInterrupt

    taken = {number: signal.getsignal(number) for number in SIGNALS}
    taken = {number: former for number, former in taken.items() if former is not signal.SIG_IGN}
    for number in taken:
        signal.signal(number, handle)
    _active.append(stop)
    try:
        yield stop
    finally:
        _active.remove(stop)
        for timer in timers:
            timer.cancel()
        for number, former in taken.items():
            signal.signal(number, former if former is not None else signal.SIG_DFL)


def _end_at_once(number: int, reason: str) -> None:
    os.write(2, f"ended at once: {reason}\n".encode())
    os._exit(128 + number)


@contextlib.contextmanager
def keep_handlers() -> Iterator[None]:
    """Keep the handlers of `catch_signals` while Ray connects; Ray's own exit with status 15 or print a trace."""
    if not _active or threading.current_thread() is not threading.main_thread():
        yield
        return
    from ray._private import utils

    before = {number: signal.getsignal(number) for number in SIGNALS}
    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        for number, handler in before.items():
            signal.signal(number, handler)
