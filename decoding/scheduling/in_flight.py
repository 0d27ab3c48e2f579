"""Steps that were launched and not looked at yet, and what looking at one says of its rows.

A device computes while the host prepares what comes next, so a step may be read one step late: the next one is
launched on what the device knows, and rows that ended meanwhile have run in vain. Knows no models and no slots' memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from decoding.controllers.base import Choice, Outcome, Reading
from decoding.scheduling.slots import Progress
from decoding.stats import EngineStats
from decoding.step import HostStep, SentStep, StepResult
from models.kv.lanes import SlotBatch


@dataclass(frozen=True)
class Look:
    """What a look at a step showed: its numbers, when they were there, and seconds.

    `seconds` are what the step took of the device's time, phases what it took of the host's: launching, and waiting.
    """

    step: HostStep
    ended_s: float
    seconds: float
    draft_s: float
    verify_s: float
    commit_s: float


@dataclass(frozen=True)
class InFlight:
    """One launched step: its rows as they were, what was chosen for it, and its numbers on their way to the host."""

    slots: SlotBatch
    progress: Sequence[Progress]
    choice: Choice
    num_missed: int
    """Tokens that the drafter caught up on in it, of all rows together."""
    drafter_forwards: int
    result: StepResult
    sent: SentStep
    launched_s: float
    """When the host was done with it, by its clock."""

    def note(self) -> None:
        """Note in its rows that they may have become longer than the host knows."""
        for one in self.progress:
            one.num_ahead += self.choice.levels + 1
            one.num_missed = 0 if self.choice.levels or one.why_plain else one.num_missed + 1

    def look(self, since_s: float) -> Look:
        """Wait for the step's numbers. It took the device from `since_s` on, if it had another one before."""
        looked_s = time.perf_counter()
        step = self.sent.read()
        ended_s = time.perf_counter()
        result = self.result
        return Look(
            step=step,
            ended_s=ended_s,
            seconds=ended_s - max(result.started, since_s),
            draft_s=result.drafted - result.started,
            verify_s=result.verified - result.drafted,
            # Between its launch and the look the host was busy with other steps.
            commit_s=self.launched_s - result.verified + ended_s - looked_s,
        )

    def count_step(self, stats: EngineStats, look: Look) -> None:
        """Add the step to its engine's totals."""
        num_rows = len(self.progress)
        stats.num_steps += 1
        stats.num_slot_steps += num_rows
        stats.target_forwards += 1
        stats.draft_s += look.draft_s
        stats.verify_s += look.verify_s
        stats.commit_s += look.commit_s
        stats.choices.add(num_rows, self.choice)

    def count(self, row: int, look: Look, kept: int) -> None:
        """Add the step to the telemetry of a row of which `kept` tokens were kept."""
        one, step, num_rows = self.progress[row], look.step, len(self.progress)
        n = step.counts[row]
        # The n-th produced token is the target's own; a text that ends before it ended inside its path.
        ended_inside = bool(one.finish_reason) and kept < n
        accepted = kept if ended_inside else n - 1
        stats = one.stats
        stats.add_step(step.num_drafted[row], accepted, sum(step.relaxed[row][1 : accepted + 1]), ended_inside)
        stats.choices.add(num_rows, self.choice)
        stats.target_forwards += 1
        stats.drafter_forwards += self.drafter_forwards
        stats.draft_ms += 1000 * look.draft_s / num_rows
        stats.verify_ms += 1000 * (look.verify_s + look.commit_s) / num_rows
        stats.batch_size_total += num_rows
        stats.degraded |= step.failed is not None and step.failed[row]

    def outcome(
        self, look: Look, offered: Sequence[int], reading: Reading, ended: Sequence[int], is_late: bool
    ) -> Outcome:
        """What the controller is told."""
        return Outcome(
            levels=self.choice.levels,
            seconds=look.seconds,
            draft_s=look.draft_s,
            verify_s=look.verify_s,
            commit_s=look.commit_s,
            accepted=[n - 1 for n in look.step.counts],
            offered=offered,
            num_missed=self.num_missed,
            reading=reading,
            ended=ended,
            is_late=is_late,
        )
