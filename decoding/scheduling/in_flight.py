"""Steps in flight: launched steps whose output the host has not processed.

With asynchronous output processing the host launches the next step before it processes the output of the last one;
rows that finished meanwhile run one step in vain.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from decoding.controllers.base import Choice
from decoding.scheduling.slots import Progress
from decoding.stats import EngineStats
from decoding.step import HostStep, StepResult
from models.backends.host_copy import HostCopy
from models.kv.lanes import SlotBatch


@dataclass(frozen=True)
class StepOutput:
    """A step's output on the host, the time of its arrival, `seconds` of device time, and phases in host time."""

    step: HostStep
    ended_s: float
    seconds: float
    draft_s: float
    verify_s: float
    commit_s: float


@dataclass(frozen=True)
class StepInFlight:
    """A launched step: its rows, the controller's choice, and its output on the way to the host."""

    slots: SlotBatch
    progress: Sequence[Progress]
    choice: Choice
    num_missed: int
    """Tokens of all rows on which the drafter caught up."""
    drafter_forwards: int
    result: StepResult
    copy: HostCopy
    launched_s: float

    def record_launch(self) -> None:
        """Record in the rows how many tokens the step may add."""
        for one in self.progress:
            one.num_in_flight += self.choice.levels + 1
            one.num_missed = 0 if self.choice.levels or one.drafter_error else one.num_missed + 1

    def wait(self, since_s: float) -> StepOutput:
        """Wait for the step's output. The device was busy with an earlier step until `since_s`."""
        result, began_s = self.result, time.perf_counter()
        step = HostStep(*self.copy.read())
        ended_s = time.perf_counter()
        return StepOutput(
            step=step,
            ended_s=ended_s,
            seconds=ended_s - max(result.started, since_s),
            draft_s=result.drafted - result.started,
            verify_s=result.verified - result.drafted,
            # Between launch and wait the host handled other steps.
            commit_s=self.launched_s - result.verified + ended_s - began_s,
        )

    def count_step(self, stats: EngineStats, output: StepOutput) -> None:
        """Add the step to the engine's statistics."""
        num_rows = len(self.progress)
        stats.num_steps += 1
        stats.num_slot_steps += num_rows
        stats.target_forwards += 1
        stats.draft_s += output.draft_s
        stats.verify_s += output.verify_s
        stats.commit_s += output.commit_s
        stats.choices.add(num_rows, self.choice)

    def count(self, row: int, output: StepOutput, kept: int) -> None:
        """Add the step to the telemetry of a row that kept `kept` of its tokens."""
        one, step, num_rows = self.progress[row], output.step, len(self.progress)
        n = step.counts[row]
        # The n-th token is the target's own; an output that ends before it ended inside its path.
        ended_inside = bool(one.finish_reason) and kept < n
        accepted = kept if ended_inside else n - 1
        stats = one.stats
        stats.add_step(step.num_drafted[row], accepted, sum(step.relaxed[row][1 : accepted + 1]), ended_inside)
        stats.choices.add(num_rows, self.choice)
        stats.target_forwards += 1
        stats.drafter_forwards += self.drafter_forwards
        stats.draft_ms += 1000 * output.draft_s / num_rows
        stats.verify_ms += 1000 * (output.verify_s + output.commit_s) / num_rows
        stats.batch_size_total += num_rows
        stats.degraded |= step.failed is not None and step.failed[row]
