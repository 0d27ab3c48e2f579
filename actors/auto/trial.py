"""Trying several methods on the first rows, one engine at a time, and keeping the one that is cheapest.

Owns whose turn it is: blocks of rows at full slots, round by round, the order turned about in every other round; which
candidates leave, when one is kept, and when acceptance has changed so much that they are tried again. Every row is
decoded once and is a result, because all candidates give the same tokens. Knows engines by their face alone; how blocks
are compared is `actors.auto.comparison`'s business.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain

from actors.auto.comparison import Block, Comparison, Recorder, Row, Step, acceptance_band
from actors.choice import CHOSEN, SLOWER, WITHIN, Choice, Standing, TriedCompletion
from actors.serving.recovery import RecoveringEngine, is_out_of_memory, release_memory
from decoding.types import Completion, Request

logger = logging.getLogger(__name__)

MIN_BLOCK_ROWS = 16
SLOTS_PER_BLOCK = 2
"""A block has at least so many times as many rows as there are slots: all come in at once first, then one by one."""
MIN_FULL_STEPS = 24
"""Steps at full slots that a block should have; short texts need more rows for them."""
MAX_LONGER = 4
"""How many times its least size a block may grow for them."""
FAR_SLOWER = 2.0
"""A candidate that takes so many times the best one's time leaves without an interval."""
FAR_SLOWER_COLD = 3.0
"""The same after the first round, in which compilers and caches still warm up; its times count for nothing else."""
MAX_FAILED_ROWS = 1
"""Rows that a candidate's drafter may fail on: one may be that row's fault."""
LEAST_DRIFT = 0.15
"""Acceptance length has changed when two windows in a row differ by more than this share from the trial's."""
ROWS_BETWEEN = 4
"""Rows from one trial to the next are at least so many times the trial's own."""
ROWS_WITHOUT_DRAFTS = 16
"""The same where plain decoding was kept, which accepts nothing that could change; twice as many each time."""


@dataclass(frozen=True)
class Candidate:
    """A method that may be kept: how an engine of so many slots is made, whether it drafts at all, and whether what it
    drafts depends on how many rows there are."""

    make: Callable[[int], RecoveringEngine]
    drafts: bool = True
    by_load: bool = False


class Trial:
    """An engine of several methods, of which it uses one at a time; `candidates` by name, the first without a drafter.

    At most one candidate's engine exists, so that each has the whole memory and its real number of slots; a change
    waits until the rows in work are done.
    """

    def __init__(
        self,
        candidates: Mapping[str, Candidate],
        slots: int,
        max_rounds: int,
        max_rechecks: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._candidates = dict(candidates)
        self._full_slots = slots
        self._slots = dict.fromkeys(candidates, slots)
        self._max_rounds = max_rounds
        self._max_rechecks = max_rechecks
        self._clock = clock
        self._block_rows = block_rows(slots)
        self._waiting: deque[Request] = deque()
        self._expected: Iterable[Request] = ()
        self._num_inside = 0
        self._engine: RecoveringEngine | None = None
        self._made = ""
        self._dropped: dict[str, str] = {}
        self._choices: tuple[Choice, ...] = ()
        self._begin("first rows")
        self._take_turn()

    # --- the face of an engine -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a row is waiting or in work."""
        return bool(self._waiting or self._num_inside)

    @property
    def num_waiting(self) -> int:
        """Rows that have no slot yet."""
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        """Slots that no row in work and no waiting one will take; none while an engine is about to be changed."""
        if self._is_changing and self._num_inside:
            return 0
        return max(0, self._slots[self._turn] - self._num_inside - len(self._waiting))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What all trials found so far. Any thread may ask."""
        return self._choices

    def submit(self, request: Request) -> None:
        """Queue a row; the next `step` with a free slot takes it."""
        self._waiting.append(request)

    def expect(self, requests: Iterable[Request]) -> None:
        """Name the rows that will be submitted next; see `decoding.Engine.expect`."""
        self._expected = requests

    def step(self) -> list[Completion]:
        """One step of the engine whose turn it is; returns the rows that finished."""
        self._take_turn()
        engine, name = self._engine, self._made
        assert engine is not None
        block = self._block if name == self._turn else None
        num_admitted = 0
        while self._waiting and not self._is_changing and engine.num_free_slots > 0:
            engine.submit(self._waiting.popleft())
            num_admitted += 1
            if block is not None:
                block.num_submitted += 1
        self._num_inside += num_admitted
        # Of rows that wait for a change nobody knows yet which engine gets them.
        engine.expect(() if self._is_changing else chain(self._waiting, self._expected))
        began_s = self._clock()
        done = engine.step()
        took_s = self._clock() - began_s
        if block is not None:
            block.steps.append(Step(took_s, min(self._num_inside, engine.num_slots), num_admitted))
        self._num_inside -= len(done)
        self._slots[name] = engine.num_slots
        if name == self._turn:
            self._count(done)
        return [_named(completion, name) for completion in done]

    # --- whose turn it is ------------------------------------------------------------------------------------------

    @property
    def _is_changing(self) -> bool:
        """Whether the rows in work have to finish before others come in."""
        return self._made != self._turn or self._block_is_over

    @property
    def _block_is_over(self) -> bool:
        """Whether the block has its rows, and steps enough or as many rows as it may take."""
        block = self._block
        if block is None or block.num_submitted < self._block_rows:
            return False
        if not block.is_over:  # looked at once: steps are many
            is_long = block.num_submitted >= MAX_LONGER * self._block_rows
            block.is_over = is_long or block.num_full_steps >= MIN_FULL_STEPS
        return block.is_over

    def _begin(self, reason: str) -> None:
        """Begin a trial of all that have not been dropped."""
        self._reason = reason
        self._blocks: list[Block] = []
        self._racing = [name for name in self._candidates if name not in self._dropped]
        self._out: dict[str, str] = {}
        self._num_rounds = 0
        self._num_tokens = self._num_rows = 0
        self._num_failed = dict.fromkeys(self._candidates, 0)
        self._round: deque[str] = deque(self._racing)
        self._turn = self._round[0]
        self._block: Recorder | None = self._recorder()

    def _take_turn(self) -> None:
        """With no row in work, end a block that is over, and have the engine whose turn it is."""
        while self._num_inside == 0:
            if self._block_is_over and self._made == self._turn:
                self._end_block()
            if self._engine is not None and self._made == self._turn:
                return
            self._engine, self._made = None, ""
            release_memory()
            try:
                self._engine = self._candidates[self._turn].make(self._slots[self._turn])
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
        """The next candidate of this round, or of the next one, unless the trial is over."""
        if not self._round:
            self._num_rounds += 1
            self._judge()
            if len(self._racing) == 1 or self._num_rounds >= self._max_rounds:
                self._settle()
                return
            turned = self._num_rounds % 2 == 1
            self._round.extend(reversed(self._racing) if turned else self._racing)
        self._turn = self._round[0]
        self._block = self._recorder()

    def _recorder(self) -> Recorder:
        return Recorder(self._turn, self._num_rounds, self._candidates[self._turn].by_load)

    def _comparisons(self) -> list[Comparison]:
        """Of the first round, and, after it, of all others: what counts stands last."""
        parts = ([one for one in self._blocks if (one.round > 0) == later] for later in (False, True))
        return [Comparison(part, self._num_tokens / self._num_rows) for part in parts if part]

    def _judge(self) -> None:
        """Let those go that are clearly slower than the best."""
        if not self._blocks:
            return
        found = self._comparisons()[-1]
        limit = FAR_SLOWER if self._num_rounds > 1 else FAR_SLOWER_COLD
        for name in found.names:
            if name in self._racing and (found.slowdown(name) >= limit or found.is_slower(name)):
                self._racing.remove(name)
                self._out[name] = SLOWER

    def _settle(self) -> None:
        """Keep the best of those that are left."""
        self._block = None
        notes = {**self._out, **self._dropped}
        standings: dict[str, Standing] = {}
        self._turn = next(iter(self._racing), next(iter(self._candidates)))
        for found in self._comparisons() if self._blocks else ():
            racing = [name for name in found.names if name in self._racing]
            self._turn = min(racing, key=found.slowdown, default=self._turn)
            standings |= {name: found.standing(name, notes.get(name, WITHIN)) for name in found.names}
        if self._turn in standings:
            standings[self._turn] = replace(standings[self._turn], note=CHOSEN)
            self._band = acceptance_band(self._blocks, self._turn, LEAST_DRIFT)
        for name in self._candidates:
            note = CHOSEN if name == self._turn else notes.get(name, "not measured")
            standings.setdefault(name, Standing(name, None, None, None, 1.0, 0, note))
        ordered = sorted(standings.values(), key=lambda one: (one.sample_s is None, one.sample_s or 0.0))
        tokens = self._num_tokens / self._num_rows if self._num_rows else 0.0
        choice = Choice(self._turn, self._reason, self._num_rows, self._num_rounds, tokens, tuple(ordered))
        self._choices = (*self._choices, choice)
        self._num_rows_since = self._num_windows_off = 0
        self._window = self._recorder()
        logger.info("keeping the method %s: %s", self._turn, choice)

    def _drop(self, name: str, why: str) -> None:
        """Try this candidate never again, and go on with the next."""
        logger.warning("the method %s is tried no more: it %s", name, why)
        self._dropped[name] = why
        self._blocks = [block for block in self._blocks if block.candidate != name]
        self._racing = [one for one in self._racing if one != name]
        self._round = deque(one for one in self._round if one != name)
        if self._block is None:
            # Kept by the last trial, and its engine cannot be made any more: a new trial among the others.
            self._begin(f"{name} {why}")
        elif not self._racing:
            # Those that were out are all there is.
            self._racing = [one for one in self._candidates if one not in self._dropped]
            self._out.clear()
            self._settle()
        elif len(self._racing) == 1 and not self._blocks:
            self._settle()
        else:
            self._next_block()

    # --- what rows tell --------------------------------------------------------------------------------------------

    def _count(self, done: list[Completion]) -> None:
        """Count finished rows into the block, or watch what they accept."""
        counter = self._window if self._block is None else self._block
        for completion in done:
            if completion.error is None and not completion.telemetry.degraded:
                told = completion.telemetry
                counter.rows.append(
                    Row(max(0, len(completion.token_ids) - 1), told.num_spec_steps, told.batch_size_mean)
                )
        if self._block is None:
            self._num_rows_since += len(done)
            self._watch()
            return
        self._num_failed[self._made] += sum(completion.telemetry.degraded for completion in done)
        if self._num_failed[self._made] > MAX_FAILED_ROWS and self._candidates[self._made].drafts:
            assert self._engine is not None
            self._waiting.extendleft(reversed(self._engine.unfinished))
            self._num_inside = 0
            self._drop(self._made, f"failed to draft for {self._num_failed[self._made]} rows")

    def _watch(self) -> None:
        """Begin another trial when what is accepted has left the band, or after a while where nothing is drafted."""
        if len(self._window.rows) < self._block_rows:
            return
        window, self._window = self._window, self._recorder()
        num_rechecks = len(self._choices) - 1
        num_tried = max(1, self._choices[-1].num_rows)
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
    """Rows of a block, at least."""
    return max(MIN_BLOCK_ROWS, SLOTS_PER_BLOCK * slots)


def _named(completion: Completion, method: str) -> TriedCompletion:
    values = {field.name: getattr(completion, field.name) for field in fields(Completion)}
    return TriedCompletion(**values, method=method)
