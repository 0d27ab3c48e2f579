"""Runs one step on the device: draft, verify, accept and commit, without synchronising with the host.

Only requests with a grammar wait for their drafts: the host computes their masks while the target runs.

Tensor shapes and host integers do not depend on device results, so a step can be compiled and captured. With
asynchronous output processing, the host launches the next step before it processes the output of the last one; the next
step's results are discarded for rows that finished in the last step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.contracts import DraftLogits, Method, StepNoise, VerificationOutput
from decoding.controllers.base import DepthChoice
from decoding.sampling import RowSampling, process_logits
from decoding.scheduling.slots import RequestState, SlotTable
from decoding.stats import EngineStats
from decoding.tree import AcceptanceResult, DraftTree, Frontier
from models.backends.host_copy import HostCopy
from models.kv.lanes import LaneModel, SlotBatch


class StepOutput(NamedTuple):
    """The output of a step on the device; `models.backends.host_copy` copies it to a `HostStep`.

    `tokens` and `logprobs` (b, D + 1) are defined up to `counts` (b,); `num_drafted` (b,) are the valid drafts;
    `relaxed` (b, D + 1) is as in `AcceptanceResult`, `failed` (b,) as in `DraftTree`; `levels` (b,) is the depth of the
    next trees, None if unchanged.
    """

    tokens: Tensor
    logprobs: Tensor
    counts: Tensor
    num_drafted: Tensor
    relaxed: Tensor
    levels: Tensor | None
    failed: Tensor | None


class HostStep(NamedTuple):
    """A `StepOutput` as host lists, one entry per row."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    counts: list[int]
    num_drafted: list[int]
    relaxed: list[list[bool]]
    levels: list[int] | None
    failed: list[bool] | None


@dataclass(frozen=True)
class StepResult:
    """The output of a step on the device, and host times in seconds.

    `packed` has the output in one tensor, see `models.backends.host_copy.pack`; None if it is not packed yet.
    `is_warm_up` is whether later steps of its kind are faster, because they are replayed.
    """

    output: StepOutput
    started: float
    drafted: float
    verified: float
    packed: Tensor | None = None
    is_warm_up: bool = False


@dataclass
class StepInFlight:
    """A launched step: its rows, the controller's choice, and the pending copy of its output to the host.

    `num_missed` are the tokens, summed over rows, that the drafter ran because earlier steps had no drafts. After
    `wait`, `ended_s` is the output's arrival by `time.perf_counter`, `seconds` the step's device time, and `commit_s`
    the host's time after verification.
    """

    slots: SlotBatch
    progress: Sequence[RequestState]
    choice: DepthChoice
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
        for state in self.progress:
            state.num_in_flight += self.choice.levels + 1
            state.num_missed = 0 if self.choice.levels or state.drafter_error else state.num_missed + 1

    def wait(self, since_s: float) -> HostStep:
        """Wait for the step's output; `since_s` is when the previous step's output arrived, the earliest start."""
        began_s = time.perf_counter()
        step = HostStep._make(self.copy.read())
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

    def count(self, row: int, step: HostStep, num_kept: int) -> None:
        """Add the step to the telemetry of a row, `num_kept` of whose new tokens were kept."""
        state, num_rows, result = self.progress[row], len(self.progress), self.result
        # The last token is the target's own; an output that ends before it ends inside the accepted path.
        ended_inside = bool(state.finish_reason) and num_kept < step.counts[row]
        accepted = num_kept if ended_inside else step.counts[row] - 1
        state.histogram[accepted] += 1
        state.batch_size_total += num_rows
        state.choices.add(num_rows, self.choice)
        telemetry = state.telemetry
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


def run_step(
    method: Method,
    lanes: LaneModel,
    table: SlotTable,
    slots: SlotBatch,
    rows: RowSampling,
    num_levels: int,
    limit: Tensor | None = None,
) -> StepResult:
    """Draft, verify, accept and commit once for `slots`, with trees of at most `num_levels` levels, of which the first
    `limit` (), if given, have valid drafts."""
    started = time.perf_counter()
    noise = StepNoise(table.noise(slots), num_levels + 1, table.vocab_size)
    max_depth = table.max_depth(slots)
    if limit is not None:
        max_depth = torch.minimum(max_depth, limit)
    tree = grow_tree(method, slots, slots.of(table.root), num_levels, rows, noise, max_depth).within(max_depth)
    drafted = time.perf_counter()
    drafts = table.constraints.read(slots, tree)
    states = lanes.forward(slots, tree.tokens, tree.depth, tree.visible())
    hidden, features = lanes.split(states)
    merged = table.guidance.merge(slots, lanes.logits(hidden), tree.depth)
    target_logits = table.constraints.apply(slots, merged, drafts)
    processed_logits = process_logits(target_logits, rows, tree.paths() if rows.reads_path else None)
    verification = VerificationOutput(
        slots, tree, target_logits, processed_logits, hidden, features, noise, rows, has_grammar=drafts is not None
    )
    result = method.acceptance.accept(verification)
    tokens = result.produced(tree)
    logprobs = path_logprobs(tree, merged, result, tokens)
    verified = time.perf_counter()
    # The accepted nodes of a chain are already at their KV positions.
    lanes.commit(slots, result.path[:, :0] if tree.is_chain else result.path, result.n)
    method.drafter.commit(verification, result)
    levels = method.tree.commit(verification, result)
    table.advance(slots, tokens, result.n)
    assert tree.num_drafted is not None
    output = StepOutput(tokens, logprobs, result.n, tree.num_drafted, result.relaxed, levels, tree.failed)
    return StepResult(output, started, drafted, verified)


def grow_tree(
    method: Method,
    slots: SlotBatch,
    root: Tensor,
    num_levels: int,
    rows: RowSampling,
    noise: StepNoise,
    max_depth: Tensor,
) -> DraftTree:
    """Grow one tree per slot level by level, at most `num_levels` deep; `root` (b,) are the pending tokens.

    `max_depth` (b,) is the deepest useful draft of each row. Nodes with NaN or +inf logits get no children.
    """
    if num_levels == 0:
        return DraftTree.root_only(root)
    policy, rule = method.tree, method.acceptance
    frontier: Frontier | None = policy.start(slots, root, num_levels, rule.needs_draft_probs)
    sound: list[Tensor] = []
    while frontier is not None:
        drafted = method.drafter.draft(slots, frontier)
        logits = process_logits(drafted, rows, frontier.path if rows.reads_path else None)
        draws = None
        if rows.any_sampled:
            # One draw per depth; with shared noise, the target's choice at this depth uses the same draw.
            draws = noise.gumbel(rule.draft_stream)[:, frontier.depth : frontier.depth + 1]
        level = DraftLogits(logits, draws, rows, max_depth)
        frontier = policy.grow(level)
        if not policy.checks_numbers:
            sound.append(level.is_sound)
    tree = policy.finish()
    return replace(tree, failed=~torch.cat(sound, dim=1).flatten(1).all(dim=1)) if sound else tree


def path_logprobs(tree: DraftTree, target_logits: Tensor, result: AcceptanceResult, tokens: Tensor) -> Tensor:
    """Return the log probabilities (b, D + 1) of `tokens` under the target's logits; undefined beyond `result.n`."""
    logits = (
        target_logits
        if tree.is_chain
        else target_logits.gather(1, result.path[:, :, None].expand(-1, -1, target_logits.shape[-1]))
    )
    return -F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)
