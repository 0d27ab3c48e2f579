"""Polls a function in a thread of the driver while a job runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import ray


@contextlib.contextmanager
def polled(look: Callable[[], None], every_s: float, name: str, last_look: bool = False) -> Iterator[None]:
    """Call `look` every `every_s` seconds in the block, and with `last_look` at its end, until an error of Ray."""
    stop = threading.Event()

    def run() -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            while not stop.wait(every_s):
                look()
            if last_look:
                look()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
