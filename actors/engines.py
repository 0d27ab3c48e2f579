"""Builds an actor's engine from the job's method: a recovering engine, or a trial of several."""

from __future__ import annotations

import functools
from collections.abc import Callable

from actors.auto.trial import Candidate, Trial
from actors.serving.engine_thread import SteppedEngine
from actors.serving.recovery import RecoveringEngine
from configs.method import Method
from decoding.scheduling.queue import RequestQueue

Make = Callable[..., SteppedEngine]
"""Builds an engine of a number of slots with the job's method, or with the method of the second argument."""


def make_engine(method: Method, slots: int, make: Make, make_plain: Callable[[], SteppedEngine]) -> SteppedEngine:
    """An engine of at most `slots` slots; `make_plain` builds one without a drafter."""
    if method.auto is None:
        return RecoveringEngine(make, make_plain, slots)

    def recovering(one: Method, num_slots: int, queue: RequestQueue) -> RecoveringEngine:
        return RecoveringEngine(lambda slots: make(slots, one), make_plain, num_slots, queue)

    candidates = {
        one.label: Candidate(
            functools.partial(recovering, one), one.drafter.kind != "none", one.controller.kind != "none"
        )
        for one in method.methods
    }
    return Trial(candidates, slots, method.auto.max_rounds, method.auto.max_rechecks)
