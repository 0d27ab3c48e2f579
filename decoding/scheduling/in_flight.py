"""Tracks steps in flight: launched steps whose output the host has not processed.

With asynchronous output processing, the host launches the next step before it processes the output of the last step;
the next step's results are discarded for rows that finished in the last step.
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
    """A step's output on the host: `ended_s` is its arrival by `time.perf_counter`, `seconds` the step's device time,
    and the other fields are host seconds by phase."""

    step: HostStep
    ended_s: float
    seconds: float
    draft_s: float
    verify_s: float
    commit_s: float


@dataclass(frozen=True)
class StepInFlight:
    """A launched step: its rows, the controller's choice, and the pending copy of its output to the host."""

    slots: SlotBatch
    progress: Sequence[Progress]
    choice: Choice
    num_missed: int
    """Tokens, summed over rows, that the drafter ran because earlier steps had no drafts."""
    drafter_forwards: int
    result: StepResult
    copy: HostCopy
    launched_s: float

    def record_launch(self) -> None:
        """Add the maximum number of the step's tokens to each row, and update `num_missed`."""
        for one in self.progress:
            one.num_in_flight += self.choice.levels + 1
            one.num_missed = 0 if self.choice.levels or one.drafter_error else one.num_missed + 1

    def wait(self, since_s: float) -> StepOutput:
        """Wait for the step's output; `since_s` is when the previous step's output arrived, the earliest start."""
        result, began_s = self.result, time.perf_counter()
        step = HostStep(*self.copy.read())
        ended_s = time.perf_counter()
        return StepOutput(
            step=step,
            ended_s=ended_s,
            seconds=ended_s - max(result.started, since_s),
            draft_s=result.drafted - result.started,
            verify_s=result.verified - result.drafted,
            # The host's time between launch and wait belongs to other steps.
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
        """Add the step to the telemetry of a row, of whose new tokens `kept` were kept."""
        one, step, num_rows = self.progress[row], output.step, len(self.progress)
        n = step.counts[row]
        # The n-th token is the target's own; an output that ends before it ends inside the accepted path.
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
