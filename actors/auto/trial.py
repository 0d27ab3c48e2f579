"""Runs the candidate methods in turn on the first rows, one engine at a time, and keeps the fastest one.

Every candidate decodes blocks of rows at full slots; the order of candidates is reversed in every other round. Slower
candidates are dropped (see `actors.auto.comparison`). A changed acceptance length starts another trial. All candidates
return the same tokens, so every row is decoded only once.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from actors.auto.comparison import Block, BlockRecorder, Step, TimeComparison, TrialRow, acceptance_band
from actors.results import CandidateResult, TrialResult
from actors.serving.recovery import QueuedEngine, RecoveringEngine, is_out_of_memory, release_memory
from configs.method import MethodConfig
from decoding.scheduling.queue import RequestQueue
from decoding.types import Completion, Request

if TYPE_CHECKING:
    from decoding import Engine

logger = logging.getLogger(__name__)

CHOSEN, WITHIN, SLOWER = "chosen", "within the interval", "slower"
MIN_BLOCK_ROWS = 16
SLOTS_PER_BLOCK = 2
"""Minimum rows of a block per slot: the first rows fill all slots at once, and later rows refill single slots."""
MIN_FULL_STEPS = 24
"""Minimum steps at full slots of a block, unless it has its maximum number of rows; short outputs need more rows to
reach it."""
MAX_LONGER = 4
"""Maximum number of rows of a block, as a multiple of its minimum."""
FAR_SLOWER = 2.0
"""A candidate whose time is this multiple of the best time is dropped, regardless of its confidence interval."""
FAR_SLOWER_COLD = 3.0
"""The same multiple after the first round, which warms up compilers and caches; later rounds do not use its times."""
MAX_FAILED_ROWS = 1
"""A candidate whose drafter fails on more rows is dropped."""
MIN_DRIFT = 0.15
"""Minimum relative change of the acceptance length, in two consecutive windows, that starts another trial."""
ROWS_BETWEEN = 4
"""Minimum number of rows between two trials, as a multiple of the last trial's rows."""
ROWS_WITHOUT_DRAFTS = 16
"""The same multiple if plain decoding was chosen, which has no acceptance length; it doubles with every trial."""


@dataclass(frozen=True)
class Candidate:
    """A method of a trial: `make` builds its engine from a number of slots and a queue, `drafts` is whether it has a
    drafter, and `by_load` whether its draft depths depend on the batch size."""

    make: Callable[[int, RequestQueue], RecoveringEngine]
    drafts: bool = True
    by_load: bool = False


class MethodTrial(QueuedEngine):
    """Decodes rows with several methods in turn, measures them, and keeps the fastest one.

    `candidates` maps names to methods; the first has no drafter. No candidate is dropped for its time before
    `min_rounds` rounds. Only one candidate's engine exists at a time, so that each can use all memory and slots; the
    engine is replaced after the started rows have finished. The trial is the admission policy of the queue that its
    engines share.
    """

    def __init__(
        self,
        candidates: Mapping[str, Candidate],
        slots: int,
        max_rounds: int,
        max_rechecks: int,
        clock: Callable[[], float] = time.perf_counter,
        min_rounds: int = 1,
    ) -> None:
        self.queue = RequestQueue(self)
        self._candidates = dict(candidates)
        self._slots = dict.fromkeys(candidates, slots)
        self._max_rounds = max_rounds
        self._max_rechecks = max_rechecks
        self._min_rounds = min_rounds
        self._clock = clock
        self._block_rows = block_rows(slots)
        self._num_admitted = 0
        self._engine: RecoveringEngine | None = None
        self._made = ""
        self._dropped: dict[str, str] = {}
        self.choices: tuple[TrialResult, ...] = ()  # results of all trials so far; read by other threads
        self._begin("first rows")
        self._take_turn()

    @property
    def num_free_slots(self) -> int:
        if self._is_changing and self.queue.num_started:
            return 0  # started rows finish before a change of engines
        return max(0, self._slots[self._turn] - self.queue.num_unfinished)

    def step(self) -> list[Completion]:
        self._take_turn()
        engine, name = self._engine, self._made
        assert engine is not None
        block = self._block if name == self._turn else None
        num_started, self._num_admitted = self.queue.num_started, 0
        began_s, admission = self._clock(), engine.admission_s
        done = engine.step()
        took_s = self._clock() - began_s
        if block is not None:
            num_active = min(num_started + self._num_admitted, engine.num_slots)
            # Engines that recovery has rebuilt count from zero.
            phases = (max(0.0, now - before) for now, before in zip(engine.admission_s, admission, strict=True))
            block.steps.append(Step(took_s, num_active, self._num_admitted, *phases))
        self._slots[name] = engine.num_slots
        if name == self._turn:
            self._count(done)
        return [replace(completion, method=name) for completion in done]

    # --- admission policy ------------------------------------------------------------------------------------------

    def may_start(self) -> bool:
        """Return whether new rows may start; they may not before a change of engines."""
        return not self._is_changing

    def on_start(self, request: Request) -> None:
        """Count a row that starts."""
        self._num_admitted += 1
        if self._block is not None:
            self._block.num_submitted += 1

    # --- turns -----------------------------------------------------------------------------------------------------

    @property
    def _is_changing(self) -> bool:
        """Whether all started rows must finish before new rows start."""
        return self._made != self._turn or self._block_is_over

    @property
    def _block_is_over(self) -> bool:
        """Whether the block has its least rows, and either enough steps at full slots or its most rows."""
        block = self._block
        if block is None or block.num_submitted < self._block_rows:
            return False
        if not block.is_over:  # cached: counting steps is slow
            is_long = block.num_submitted >= MAX_LONGER * self._block_rows
            block.is_over = is_long or block.num_full_steps >= MIN_FULL_STEPS
        return block.is_over

    def _begin(self, reason: str) -> None:
        """Start a trial of all candidates that are not dropped."""
        self._reason = reason
        self._blocks: list[Block] = []
        self._racing = [name for name in self._candidates if name not in self._dropped]
        self._out: dict[str, str] = {}
        self._num_rounds = 0
        self._num_tokens = self._num_rows = 0
        self._num_failed = dict.fromkeys(self._candidates, 0)
        self._round: deque[str] = deque(self._racing)
        self._turn = self._round[0]
        self._block: BlockRecorder | None = self._recorder()

    def _take_turn(self) -> None:
        """Finish a complete block and build the next engine, if no row is running."""
        while self.queue.num_started == 0:
            if self._block_is_over and self._made == self._turn:
                self._end_block()
            if self._engine is not None and self._made == self._turn:
                return
            self._engine, self._made = None, ""
            release_memory()
            try:
                self._engine = self._candidates[self._turn].make(self._slots[self._turn], self.queue)
            except Exception as error:
                if not is_out_of_memory(error) or not self._candidates[self._turn].drafts:
                    raise
                message = str(error)
            else:
                self._made = self._turn
                return
            self._drop(self._turn, f"does not fit into the device's memory: {message}")

    def _end_block(self) -> None:
        assert self._block is not None
        block = self._block.block()
        if block is not None:
            self._blocks.append(block)
            self._num_tokens += self._block.num_tokens
            self._num_rows += len(self._block.rows)
        self._round.popleft()
        self._next_block()

    def _next_block(self) -> None:
        """Select the next candidate, or finish the trial."""
        if not self._round:
            self._num_rounds += 1
            self._judge()
            is_over = len(self._racing) == 1 and self._num_rounds >= self._min_rounds
            if is_over or self._num_rounds >= self._max_rounds:
                self._choose()
                return
            turned = self._num_rounds % 2 == 1
            self._round.extend(reversed(self._racing) if turned else self._racing)
        self._turn = self._round[0]
        self._block = self._recorder()

    def _recorder(self) -> BlockRecorder:
        return BlockRecorder(self._turn, self._num_rounds, self._candidates[self._turn].by_load)

    def _comparisons(self) -> list[TimeComparison]:
        """Return the comparison of the first round and the comparison of all later rounds; the last one decides."""
        parts = ([block for block in self._blocks if (block.round > 0) == later] for later in (False, True))
        return [TimeComparison(part, self._num_tokens / self._num_rows) for part in parts if part]

    def _judge(self) -> None:
        """Remove candidates that are clearly slower than the best from this trial."""
        if not self._blocks or self._num_rounds < self._min_rounds:
            return
        comparison = self._comparisons()[-1]
        limit = FAR_SLOWER if self._num_rounds > 1 else FAR_SLOWER_COLD
        for name in comparison.names:
            if name in self._racing and (comparison.slowdown(name) >= limit or comparison.is_slower(name)):
                self._racing.remove(name)
                self._out[name] = SLOWER

    def _choose(self) -> None:
        """Keep the fastest remaining candidate."""
        self._block = None
        notes = {**self._out, **self._dropped}
        standings: dict[str, CandidateResult] = {}
        plain = next(iter(self._candidates))
        self._turn = next(iter(self._racing), next(iter(self._candidates)))
        for comparison in self._comparisons():
            racing = [name for name in comparison.names if name in self._racing]
            self._turn = min(racing, key=comparison.slowdown, default=self._turn)
            standings |= {name: comparison.standing(name, notes.get(name, WITHIN), plain) for name in comparison.names}
        if self._turn in standings:
            standings[self._turn] = replace(standings[self._turn], note=CHOSEN)
            self._band = acceptance_band(self._blocks, self._turn, MIN_DRIFT)
        for name in self._candidates:
            note = CHOSEN if name == self._turn else notes.get(name, "not measured")
            standings.setdefault(name, CandidateResult(name, None, None, None, 1.0, 0, note))
        ordered = sorted(standings.values(), key=lambda result: (result.sample_s is None, result.sample_s or 0.0))
        tokens = self._num_tokens / self._num_rows if self._num_rows else 0.0
        first = [block for block in self._blocks if block.candidate == plain]
        timed = [block for block in first if block.round > 0] or first
        times = tuple(block.sample_phases(tokens) for block in timed)
        choice = TrialResult(self._turn, self._reason, self._num_rows, self._num_rounds, tokens, tuple(ordered), times)
        self.choices = (*self.choices, choice)
        self._num_rows_since = self._num_windows_off = 0
        self._window = self._recorder()
        logger.info("keeping the method %s: %s", self._turn, choice)

    def _drop(self, name: str, why: str) -> None:
        """Exclude a candidate from all trials and continue with the next."""
        logger.warning("the method %s is dropped: it %s", name, why)
        self._dropped[name] = why
        self._blocks = [block for block in self._blocks if block.candidate != name]
        self._racing = [candidate for candidate in self._racing if candidate != name]
        self._round = deque(candidate for candidate in self._round if candidate != name)
        if self._block is None:
            # The chosen candidate's engine cannot be built any more: start a trial among the others.
            self._begin(f"{name} {why}")
        elif not self._racing:
            # Only candidates that were slower remain.
            self._racing = [candidate for candidate in self._candidates if candidate not in self._dropped]
            self._out.clear()
            self._choose()
        elif len(self._racing) == 1 and not self._blocks:
            self._choose()
        else:
            self._next_block()

    # --- finished rows ---------------------------------------------------------------------------------------------

    def _count(self, done: list[Completion]) -> None:
        """Record finished rows in the block, or in the window of acceptance lengths."""
        counter = self._window if self._block is None else self._block
        for completion in done:
            if completion.error is None and not completion.telemetry.degraded:
                telemetry = completion.telemetry
                num_tokens = max(0, len(completion.token_ids) - 1)
                counter.rows.append(TrialRow(num_tokens, telemetry.num_spec_steps, telemetry.batch_size_mean))
        if self._block is None:
            self._num_rows_since += len(done)
            self._watch()
            return
        self._num_failed[self._made] += sum(completion.telemetry.degraded for completion in done)
        if self._num_failed[self._made] > MAX_FAILED_ROWS and self._candidates[self._made].drafts:
            self.queue.restart()
            self._drop(self._made, f"failed to draft for {self._num_failed[self._made]} rows")

    def _watch(self) -> None:
        """Start another trial if the acceptance length left its band, or after many rows without drafts."""
        if len(self._window.rows) < self._block_rows:
            return
        window, self._window = self._window, self._recorder()
        num_rechecks = len(self.choices) - 1
        num_tried = max(1, self.choices[-1].num_rows)
        if num_rechecks >= self._max_rechecks or len(self._candidates) - len(self._dropped) < 2:
            return
        if not self._candidates[self._turn].drafts:
            if self._num_rows_since >= ROWS_WITHOUT_DRAFTS * num_tried * 2**num_rechecks:
                self._begin(f"{self._num_rows_since} rows were decoded without drafts")
            return
        length = window.acceptance_length
        low, high = self._band
        self._num_windows_off = 0 if low <= length <= high else self._num_windows_off + 1
        if self._num_windows_off >= 2 and self._num_rows_since >= ROWS_BETWEEN * num_tried:
            self._begin(f"acceptance length {length:.2f} where the trial had {low:.2f} to {high:.2f}")


def block_rows(slots: int) -> int:
    """Return the least rows of a block for this number of slots."""
    return max(MIN_BLOCK_ROWS, SLOTS_PER_BLOCK * slots)


def make_engine(
    method: MethodConfig, slots: int, make: Callable[..., Engine], make_plain: Callable[[], Engine]
) -> RecoveringEngine | MethodTrial:
    """Return a recovering engine of at most `slots` slots, or a trial of the candidates of `method.auto`.

    `make(slots)` builds an engine with the job's method, `make(slots, method)` an engine with another method;
    `make_plain()` builds an engine without a drafter.
    """
    if method.auto is None:
        return RecoveringEngine(make, make_plain, slots)

    def recovering(config: MethodConfig, num_slots: int, queue: RequestQueue) -> RecoveringEngine:
        return RecoveringEngine(lambda slots: make(slots, config), make_plain, num_slots, queue)

    candidates = {
        config.label: Candidate(
            functools.partial(recovering, config), config.drafter.kind != "none", config.controller.kind != "none"
        )
        for config in method.methods
    }
    auto = method.auto
    return MethodTrial(candidates, slots, auto.max_rounds, auto.max_rechecks, min_rounds=auto.min_rounds)
