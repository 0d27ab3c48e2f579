"""Fake engines with given row lengths and step costs, on a fake clock.

A method drafts `length` tokens; each is accepted with the workload's probability if all before it were. A step costs
length·c + v, where v grows with the batch like the verification of length + 1 tokens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import decoding.errors
from actors.auto.trial import Candidate
from actors.serving.recovery import RecoveringEngine
from decoding.scheduling.queue import RequestQueue
from decoding.stats import EngineStats
from decoding.types import Completion, Request, Telemetry

TOKENS_AT_ONCE = 100
"""Tokens of a forward, over all rows, from which on each further token costs as much as a forward of one row."""


class Clock:
    """A clock that engines advance."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Workload:
    """The parameters that determine the best method, and the noise of steps."""

    batch: int
    num_tokens: int
    latency_ratio: float
    acceptance: float
    noise: float = 0.0

    def num_steps(self, drafts: int) -> float:
        """Mean steps of a row; the last one may be cut short.

        Recursion over the missing tokens: a step yields k + 1 tokens with probability α^k (1 - α), and all γ + 1 with
        α^γ (Leviathan et al., eq. 1).
        """
        alpha = self.acceptance
        shares = [alpha**kept * (1 - alpha) for kept in range(drafts)] + [alpha**drafts]
        steps = [0.0]
        for missing in range(1, self.num_tokens):
            steps.append(1 + sum(share * steps[max(0, missing - kept - 1)] for kept, share in enumerate(shares)))
        return steps[-1]

    def step_s(self, drafts: int) -> float:
        """Seconds of a step; a target forward over one token takes 1 ms."""
        forward = max(1.0, self.batch * (drafts + 1) / TOKENS_AT_ONCE)
        return 0.001 * (drafts * self.latency_ratio * max(1.0, self.batch / TOKENS_AT_ONCE) + forward)

    def sample_s(self, drafts: int) -> float:
        """Engine seconds of one row at full slots."""
        return admit_s(drafts) + self.num_steps(drafts) * self.step_s(drafts) / self.batch


ENCODE_S = 0.0002


def admit_s(drafts: int) -> float:
    """Encoding (`ENCODE_S`) and prefill of one row, by target and drafter."""
    return 0.0005 * (1.2 if drafts else 1.0)


class CostEngine:
    """One method on one workload; the drafter raises on rows that `fails_on` selects."""

    def __init__(
        self,
        name: str,
        drafts: int,
        slots: int,
        workload: Callable[[Request], Workload],
        clock: Clock,
        rng: random.Random,
        fails_on: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        self.name, self.drafts, self.slots = name, drafts, slots
        self.workload, self.clock, self.rng, self.fails_on = workload, clock, rng, fails_on
        self.waiting: deque[Request] = deque()
        self.active: list[list[int]] = []
        self.rows: list[Request] = []
        self.stats = EngineStats()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.rows)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_free_slots(self) -> int:
        return max(0, self.slots - len(self.rows) - len(self.waiting))

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def expect(self, requests: Iterable[Request]) -> None:
        pass

    def step(self) -> list[Completion]:
        while self.waiting and len(self.rows) < self.slots:
            self.rows.append(self.waiting.popleft())
            self.active.append([1, 0, 0])  # tokens, steps, sum of batch sizes
            self.clock.now_s += admit_s(self.drafts)
            self.stats.encode_s += ENCODE_S
            self.stats.prefill_s += admit_s(self.drafts) - ENCODE_S
        if self.drafts and any(self.fails_on(row) for row in self.rows):
            raise decoding.errors.DrafterError("the drafter failed: IndexError")
        costs = [self.workload(row) for row in self.rows]
        noise = self.rng.lognormvariate(0.0, costs[0].noise) if costs[0].noise else 1.0
        self.clock.now_s += noise * max(cost.step_s(self.drafts) for cost in costs)
        done, left = [], []
        for request, row, cost in zip(self.rows, self.active, costs, strict=True):
            accepted = 0
            while accepted < self.drafts and self.rng.random() < cost.acceptance:
                accepted += 1
            row[0] += accepted + 1
            row[1] += 1
            if row[0] >= cost.num_tokens:
                done.append(self.finish(request, cost.num_tokens, row[1]))
            else:
                left.append((request, row))
        self.rows, self.active = [request for request, _ in left], [row for _, row in left]
        return done

    def finish(self, request: Request, num_tokens: int, num_steps: int) -> Completion:
        telemetry = Telemetry(num_spec_steps=num_steps, num_accepted_draft_tokens=num_tokens - 1 - num_steps)
        return Completion(request.sample_id, tuple(range(num_tokens)), telemetry=telemetry, text=request.prompt)


METHODS = {"plain": 0, "chain-2": 2, "chain-5": 5}


class Makers:
    """Makes candidates over these engines, and records the engines in order."""

    def __init__(
        self,
        workload: Callable[[Request], Workload],
        seed: int = 0,
        fails_on: Callable[[str, Request], bool] = lambda name, request: False,
    ) -> None:
        self.workload, self.fails_on = workload, fails_on
        self.rng, self.clock = random.Random(seed), Clock()
        self.made: list[tuple[str, int]] = []

    def candidates(self, methods: dict[str, int] | None = None) -> dict[str, Candidate]:
        """By name, plain decoding first."""
        names = METHODS if methods is None else methods
        return {name: Candidate(self._maker(name, drafts), drafts > 0) for name, drafts in names.items()}

    def engine(self, name: str, drafts: int, slots: int) -> CostEngine:
        self.made.append((name, slots))
        fails_on = self.fails_on
        return CostEngine(
            name, drafts, slots, self.workload, self.clock, self.rng, lambda request: fails_on(name, request)
        )

    def _maker(self, name: str, drafts: int) -> Callable[[int, RequestQueue], RecoveringEngine]:
        return lambda slots, queue: RecoveringEngine(
            lambda size: self.engine(name, drafts, size), lambda: self.engine("without", 0, 1), slots, queue
        )
