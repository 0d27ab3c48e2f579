"""Steps that were launched and not looked at yet, and what looking at one says of its rows.

A device computes while the host prepares what comes next, so a step may be read one step late: the next one is
launched on what the device knows, and rows that ended meanwhile have run in vain. Knows no models and no slots' memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decoding.controller import Choice, Outcome, Reading
from decoding.slots import Progress
from decoding.step import HostStep, SentStep, StepResult
from models.lanes import SlotBatch


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

    def launched(self) -> None:
        """Note in its rows that they may have become longer than the host knows."""
        for one in self.progress:
            one.num_ahead += self.choice.levels + 1
            one.num_missed = 0 if self.choice.levels else one.num_missed + 1

    def count(self, row: int, step: HostStep, kept: int, ended_s: float) -> None:
        """Add the step to the telemetry of a row of which `kept` tokens were kept."""
        one, result, num_rows = self.progress[row], self.result, len(self.progress)
        n = step.counts[row]
        # The n-th produced token is the target's own; a text that ends before it ended inside its path.
        ended_inside = bool(one.finish_reason) and kept < n
        accepted = kept if ended_inside else n - 1
        stats = one.stats
        stats.add_step(step.num_drafted[row], accepted, sum(step.relaxed[row][1 : accepted + 1]), ended_inside)
        stats.choices.add(num_rows, self.choice)
        stats.target_forwards += 1
        stats.drafter_forwards += self.drafter_forwards
        stats.draft_ms += 1000 * (result.drafted - result.started) / num_rows
        stats.verify_ms += 1000 * (ended_s - result.drafted) / num_rows
        stats.batch_size_total += num_rows
        stats.degraded |= step.failed is not None and step.failed[row]

    def outcome(
        self, step: HostStep, offered: Sequence[int], since_s: float, ended_s: float, reading: Reading, ended: list[int]
    ) -> Outcome:
        """What the controller is told; the step took from `since_s` on, as before that the device had another one."""
        result = self.result
        return Outcome(
            levels=self.choice.levels,
            seconds=ended_s - since_s,
            draft_s=result.drafted - result.started,
            verify_s=result.verified - result.drafted,
            commit_s=ended_s - result.verified,
            accepted=[n - 1 for n in step.counts],
            offered=offered,
            num_missed=self.num_missed,
            reading=reading,
            ended=ended,
        )
