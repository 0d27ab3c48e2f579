"""A pair whose engines sleep instead of computing, to measure everything around the engines."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from configs.schema import CaptionJobConfig
from decoding.types import Completion, Request, Telemetry

TEXT = "a photograph of a small harbour with boats " * 5
"""The caption of every row."""


class PacedEngine:
    """An engine that finishes `rows_per_s` rows per second: each of its `slots` is busy for the same time per row."""

    def __init__(self, slots: int, rows_per_s: float) -> None:
        self._row_s = slots / rows_per_s
        self._running: list[tuple[float, Request]] = []
        self._free_since_s = [0.0] * slots

    def submit(self, request: Request) -> None:
        """Start a request in the slot that has been free for the longest time."""
        self._free_since_s.sort()
        end_s = max(self._free_since_s.pop(0), time.monotonic()) + self._row_s
        self._running.append((end_s, request))

    def expect(self, requests: Iterable[Request]) -> None:
        """Prefetch nothing: there are no prompts to encode."""

    def step(self) -> list[Completion]:
        """Sleep until the next row ends, and return all rows that have ended."""
        time.sleep(max(0.0, min(end_s for end_s, _ in self._running) - time.monotonic()))
        now_s = time.monotonic()
        ended = [entry for entry in self._running if entry[0] <= now_s]
        self._running = [entry for entry in self._running if entry[0] > now_s]
        self._free_since_s += [end_s for end_s, _ in ended]
        tokens = tuple(range(48))
        return [
            Completion(request.sample_id, tokens, TEXT, finish_reason="stop", telemetry=Telemetry(num_spec_steps=12))
            for _, request in ended
        ]


class PacedPair:
    """A pair of paced engines, without models; actors load it by calling it."""

    target_id = "paced"
    drafter_id = ""
    grammar = None

    def __init__(self, rows_per_s: float) -> None:
        self._rows_per_s = rows_per_s

    def __call__(self, config: CaptionJobConfig, num_threads: int | None) -> Any:
        return self

    def render(self, messages: Any) -> str:
        return "x"

    def engine(self, slots: int) -> PacedEngine:
        return PacedEngine(slots, self._rows_per_s)

    def plain_engine(self, slots: int = 1) -> PacedEngine:
        return self.engine(slots)
