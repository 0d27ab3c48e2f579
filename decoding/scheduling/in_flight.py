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


@dataclass
class StepInFlight:
    """A launched step: its rows, the controller's choice, and the pending copy of its output to the host.

    `num_missed` are the tokens, summed over rows, that the drafter ran because earlier steps had no drafts. After
    `wait`, `ended_s` is the output's arrival by `time.perf_counter`, `seconds` the step's device time, and `commit_s`
    the host's time after verification.
    """

    slots: SlotBatch
    progress: Sequence[Progress]
    choice: Choice
    num_missed: int
    drafter_forwards: int
    result: StepResult
    copy: HostCopy
    launched_s: float
    ended_s: float = 0.0
    seconds: float = 0.0
    commit_s: float = 0.0

    def record_launch(self) -> None:
        """Add the maximum number of the step's tokens to each row, and update `num_missed`."""
        for one in self.progress:
            one.num_in_flight += self.choice.levels + 1
            one.num_missed = 0 if self.choice.levels or one.drafter_error else one.num_missed + 1

    def wait(self, since_s: float) -> HostStep:
        """Wait for the step's output; `since_s` is when the previous step's output arrived, the earliest start."""
        began_s = time.perf_counter()
        step = HostStep(*self.copy.read())
        self.ended_s = time.perf_counter()
        self.seconds = self.ended_s - max(self.result.started, since_s)
        # The host's time between launch and wait belongs to other steps.
        self.commit_s = self.launched_s - self.result.verified + self.ended_s - began_s
        return step

    def count_step(self, stats: EngineStats) -> None:
        """Add the step to the engine's statistics."""
        stats.num_steps += 1
        stats.num_slot_steps += len(self.progress)
        stats.target_forwards += 1
        stats.draft_s += self.result.drafted - self.result.started
        stats.verify_s += self.result.verified - self.result.drafted
        stats.commit_s += self.commit_s

    def count(self, row: int, step: HostStep, kept: int) -> None:
        """Add the step to the telemetry of a row, of whose new tokens `kept` were kept."""
        one, num_rows, result = self.progress[row], len(self.progress), self.result
        # The last token is the target's own; an output that ends before it ends inside the accepted path.
        ended_inside = bool(one.finish_reason) and kept < step.counts[row]
        accepted = kept if ended_inside else step.counts[row] - 1
        one.histogram[accepted] += 1
        one.batch_size_total += num_rows
        one.choices.add(num_rows, self.choice)
        telemetry = one.telemetry
        telemetry.num_spec_steps += 1
        telemetry.num_draft_tokens += step.num_drafted[row]
        telemetry.num_accepted_draft_tokens += accepted
        telemetry.num_relaxed_accepts += sum(step.relaxed[row][1 : accepted + 1])
        telemetry.ended_inside_path = ended_inside
        telemetry.target_forwards += 1
        telemetry.drafter_forwards += self.drafter_forwards
        telemetry.draft_ms += 1000 * (result.drafted - result.started) / num_rows
        telemetry.verify_ms += 1000 * (result.verified - result.drafted + self.commit_s) / num_rows
        telemetry.degraded |= step.failed is not None and step.failed[row]
