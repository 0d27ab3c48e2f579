"""Handles node drain: finished rows are written at once, and process deaths on a draining node do not count for rows.
Ray restarts the actors of a draining node elsewhere without counting that as a restart."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping

import ray

from actors.events import Events
from pipeline.cluster.ray_session import poll

LOOK_S = 1.0
"""Poll interval, as in Ray Data."""


def draining_nodes() -> Mapping[str, int]:
    """Return the draining nodes of the running Ray and their deadlines, in milliseconds since 1970, 0 if unknown."""
    return ray._private.state.state.get_draining_nodes()  # type: ignore[no-any-return]


class Drains:
    """Calls `spare` once per draining node, `hurry(True)` when the first node starts to drain, and `hurry(False)` when
    no node drains any more."""

    def __init__(
        self, spare: Callable[[list[str]], None], hurry: Callable[[bool], None], events: Events | None = None
    ) -> None:
        self._spare, self._hurry, self._events = spare, hurry, events
        self._known: set[str] = set()
        self._hurried = False

    def look(self, draining: Mapping[str, int]) -> None:
        """Update the state with the nodes that drain now and their deadlines."""
        if bool(draining) != self._hurried:
            self._hurried = bool(draining)
            self._hurry(self._hurried)
        fresh = sorted(draining.keys() - self._known)
        if fresh:
            self._known.update(fresh)
            self._spare(fresh)
        for node in fresh:
            left_s = max(0.0, round(draining[node] / 1000 - time.time(), 1)) if draining[node] else None
            if self._events is not None and self._events.enabled:
                self._events.emit("node_drains", "warning", node=node, left_s=left_s)
            else:
                when = "" if left_s is None else f", gone in {left_s:.0f} s"
                print(f"node {node[:12]} drains{when}: new rows go to other nodes", file=sys.stderr, flush=True)


def watch_drains(
    drains: Drains, look: Callable[[], Mapping[str, int]] = draining_nodes, every_s: float = LOOK_S
) -> contextlib.AbstractContextManager[None]:
    """Poll the draining nodes every `every_s` seconds while the block runs."""
    return poll(lambda: drains.look(look()), every_s, "drains")
