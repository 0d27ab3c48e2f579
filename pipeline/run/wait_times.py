"""Wait times: actors report how long they were idle and how long rows waited for them.

One Ray actor adds them up; the driver reads it when the job is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from actors.serving.engine_thread import Waits
from pipeline.cluster.ray_session import beside_driver

READ_TIMEOUT_S = 30.0


class _FlowActor:
    """The latest report of every actor; costs no CPU of Ray's."""

    def __init__(self) -> None:
        self._latest: dict[str, Waits] = {}

    def report(self, who: str, waits: Waits) -> None:
        self._latest[who] = waits

    def read(self) -> list[Waits]:
        return list(self._latest.values())


@dataclass(frozen=True)
class Report:
    """Sends an actor's wait times without waiting for an answer; the last report of each `who` counts."""

    actor: Any

    def __call__(self, who: str, waits: Waits) -> None:
        self.actor.report.remote(who, waits)


class Flow:
    """What actors have reported."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.report = Report(actor)

    def total(self) -> Waits:
        """The waits of all actors together; zero where the cluster is going away."""
        try:
            found: list[Waits] = ray.get(self._actor.read.remote(), timeout=READ_TIMEOUT_S)
        except ray.exceptions.RayError:
            return Waits()
        return sum(found, Waits())


@contextlib.contextmanager
def measured() -> Iterator[Flow]:
    """A place for actors to report to, while the block runs."""
    actor = ray.remote(num_cpus=0, scheduling_strategy=beside_driver())(_FlowActor).remote()
    try:
        yield Flow(actor)
    finally:
        ray.kill(actor)
