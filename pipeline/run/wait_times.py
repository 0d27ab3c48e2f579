"""Collects wait times: actors report how long they were idle and how long rows waited; one Ray actor adds them up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from actors.serving.engine_thread import Waits
from pipeline.cluster.ray_session import driver_actor

READ_TIMEOUT_S = 30.0


class _LatestReports:
    """Keeps the latest report of every actor."""

    def __init__(self) -> None:
        self._latest: dict[str, Waits] = {}

    def report(self, who: str, waits: Waits) -> None:
        self._latest[who] = waits

    def total(self) -> Waits:
        return sum(self._latest.values(), Waits())


@dataclass(frozen=True)
class WaitTimes:
    """Client of the Ray actor that collects reports; cheap to send to workers."""

    actor: Any

    def report(self, who: str, waits: Waits) -> None:
        """Send an actor's wait times without waiting for an answer; only the last report of each `who` counts."""
        self.actor.report.remote(who, waits)

    def total(self) -> Waits:
        """Return the sum of the wait times of all actors; zero if the cluster is shutting down."""
        try:
            total: Waits = ray.get(self.actor.total.remote(), timeout=READ_TIMEOUT_S)
        except ray.exceptions.RayError:
            return Waits()
        return total


@contextlib.contextmanager
def collect_waits() -> Iterator[WaitTimes]:
    """Collect the wait times that actors report while the block runs."""
    with driver_actor(_LatestReports) as actor:
        yield WaitTimes(actor)
