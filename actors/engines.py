"""From a job's method to the engine that its actor steps: one that recovers, or a trial of several of those.

Knows the configuration and how engines are made of each other; how one is made of a pair is told by the actor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from actors.auto.trial import Candidate, Trial
from actors.serving.engine_thread import SteppedEngine
from actors.serving.recovery import RecoveringEngine
from configs.method import Method

Make = Callable[..., SteppedEngine]
"""Of a number of slots: a fresh engine with the job's method; and of a second argument, with that method."""


def make_engine(method: Method, slots: int, make: Make, make_plain: Callable[[], SteppedEngine]) -> SteppedEngine:
    """The engine of a job with this method, of at most `slots` rows; `make_plain` gives one for rows without drafts."""

    if method.auto is None:
        return RecoveringEngine(make, make_plain, slots)

    def recovering(one: Method, num_slots: int) -> RecoveringEngine:
        return RecoveringEngine(lambda slots: make(slots, one), make_plain, num_slots)

    candidates = {
        one.label: Candidate(
            functools.partial(recovering, one), one.drafter.kind != "none", one.controller.kind != "none"
        )
        for one in method.methods
    }
    return Trial(candidates, slots, method.auto.max_rounds, method.auto.max_rechecks)
