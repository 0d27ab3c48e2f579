"""Nodes that leave with notice: seen while they drain, and told to those who have something to bring to safety.

Ray itself places nothing new on a draining node, gives its actors no further batch, starts them elsewhere when it goes,
and does not count that against their restarts. What is left is told from here: finished rows are saved at once, and
what dies on such a node is no row's doing. Knows nodes by their ids, and nothing of rows.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import ray

from actors.events import Events

LOOK_S = 1.0
"""Between two looks at the nodes; Ray Data looks as often."""

Look = Callable[[], Mapping[str, int]]
"""The nodes that drain now, and when each is to be gone: milliseconds since 1970, 0 where nobody said."""


def draining_nodes() -> Mapping[str, int]:
    """The nodes of the running Ray that drain now. Nothing public of Ray's tells, short of its dashboard."""
    found: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
    return found


class Drains:
    """What is known of nodes that drain, look by look.

    `spare` is told each of them once, `hurry` whenever there begin to be some, or there are none any more.
    """

    def __init__(
        self, spare: Callable[[list[str]], None], hurry: Callable[[bool], None], events: Events | None = None
    ) -> None:
        self._spare, self._hurry, self._events = spare, hurry, events
        self._known: set[str] = set()
        self._hurried = False

    def look(self, draining: Mapping[str, int]) -> None:
        """Take in which nodes drain now."""
        if bool(draining) != self._hurried:
            self._hurried = bool(draining)
            self._hurry(self._hurried)
        fresh = sorted(draining.keys() - self._known)
        if fresh:
            self._known.update(fresh)
            self._spare(fresh)
            for node in fresh:
                self._say(node, draining[node])

    def _say(self, node: str, deadline_ms: int) -> None:
        left_s = max(0.0, round(deadline_ms / 1000 - time.time(), 1)) if deadline_ms else None
        if self._events is not None and self._events.enabled:
            self._events.emit("node_drains", "warning", node=node, left_s=left_s)
        else:
            when = "" if left_s is None else f", gone in {left_s:.0f} s"
            print(f"node {node[:12]} drains{when}: new rows go to other nodes", file=sys.stderr, flush=True)


@contextlib.contextmanager
def watched(drains: Drains, look: Look = draining_nodes, every_s: float = LOOK_S) -> Iterator[None]:
    """Look after the nodes while the block runs."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(every_s):
            try:
                drains.look(look())
            except ray.exceptions.RayError:
                return  # the cluster is going away; its own error is the one to show

    thread = threading.Thread(target=run, name="drains", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
