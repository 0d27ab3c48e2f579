"""The one way in which tests wait for another process or thread that cannot notify them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import TypeVar

PATIENCE_S = 900.0
"""Longest wait of a failing test."""
POLL_S = 0.02
Found = TypeVar("Found")


def until(look: Callable[[], Found], reason: Callable[[], str] = lambda: "nothing was found") -> Found:
    """The first true value of `look`; fails with `reason` after `PATIENCE_S` of waiting."""
    pause = Event()
    for _ in range(int(PATIENCE_S / POLL_S)):
        if value := look():
            return value
        pause.wait(POLL_S)
    raise AssertionError(reason())
