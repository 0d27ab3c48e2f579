"""Decodes some requests with the job's method, and others plainly, in turn on one thread."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from actors.serving.recovery import QueuedEngine, RecoveringEngine
from decoding.types import Completion, Request

if TYPE_CHECKING:
    from decoding import Engine

STEPS_RATIO = 4
"""Assumed steps of plain decoding per step of the method; plain slots keep up with the method below this ratio."""


def split_slots(slots: int, share: float) -> tuple[int, int]:
    """Return the slots of the method and of plain decoding, which decodes `share` of the rows too. Together they are
    `slots`, or 2 if that is 1."""
    weight = STEPS_RATIO * share
    plain = max(1, min(slots - 1, round(slots * weight / (1 + weight))))
    return max(1, slots - plain), plain


def is_audited(share: float, seed: int, sample_id: str) -> bool:
    """Return whether a row is in the audited share; every row is chosen independently, by a hash of seed and id."""
    digest = hashlib.blake2b(f"audit\x00{seed}\x00{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2.0**64


class AuditedEngine(QueuedEngine):
    """Runs `engine`, and beside it a plain engine of `slots` slots for requests with `plain`; each recovers alone."""

    def __init__(self, engine: QueuedEngine, make_plain: Callable[[int], Engine], slots: int) -> None:
        self._engine = engine
        self._plain = RecoveringEngine(make_plain, lambda: make_plain(1), slots)
        self.queue = engine.queue

    @property
    def num_free_slots(self) -> int:
        return self._engine.num_free_slots

    @property
    def has_work(self) -> bool:
        return self._engine.has_work or self._plain.has_work

    @property
    def num_waiting(self) -> int:
        return self._engine.num_waiting + self._plain.num_waiting

    def submit(self, request: Request) -> None:
        (self._plain if request.plain else self._engine).submit(request)

    def step(self) -> list[Completion]:
        return [completion for engine in (self._engine, self._plain) if engine.has_work for completion in engine.step()]
