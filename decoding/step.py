"""Runs one step on the device: draft, verify, accept and commit, without synchronising with the host.

Tensor shapes and host integers do not depend on device results, so a step can be compiled and captured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.contracts import Judgement, Level, Method, StepNoise
from decoding.sampling import RowSampling, warp
from decoding.scheduling.slots import SlotTable
from decoding.tree import DraftTree, Frontier, Verdict
from models.kv.lanes import LaneModel, SlotBatch


@dataclass(frozen=True)
class HostStep:
    """The result of a step as host lists, one entry per row.

    `tokens` and `logprobs` (b, D + 1) are defined up to `counts` (b,); `num_drafted` (b,) are the valid drafts;
    `relaxed` (b, D + 1) is as in `Verdict`, `failed` (b,) as in `DraftTree`; `levels` (b,) is the depth of the next
    trees, None if unchanged.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    counts: list[int]
    num_drafted: list[int]
    relaxed: list[list[bool]]
    levels: list[int] | None
    failed: list[bool] | None


@dataclass(frozen=True)
class StepResult:
    """The result of a step on the device: the fields of `HostStep` as tensors, and host times in seconds."""

    parts: tuple[Tensor | None, ...]
    started: float
    drafted: float
    verified: float


def run_step(
    method: Method, lanes: LaneModel, table: SlotTable, slots: SlotBatch, rows: RowSampling, num_levels: int
) -> StepResult:
    """Draft, verify, accept and commit once for `slots`, with trees of at most `num_levels` levels."""
    started = time.perf_counter()
    noise = StepNoise(table.noise(slots), num_levels + 1, table.vocab_size)
    max_depth = table.max_depth(slots)
    tree = grow_tree(method, slots, slots.of(table.root), num_levels, rows, noise, max_depth).within(max_depth)
    drafted = time.perf_counter()
    hidden = lanes.forward(slots, tree.tokens, tree.depth, tree.visible())
    raw = table.guidance.merge(slots, lanes.logits(hidden), tree.depth)
    judgement = Judgement(slots, tree, raw, _warp_nodes(tree, raw, rows), hidden, noise, rows)
    verdict = method.acceptance.judge(judgement)
    tokens = verdict.produced(tree)
    logprobs = path_logprobs(tree, raw, verdict, tokens)
    verified = time.perf_counter()
    # The accepted nodes of a chain are already at their KV positions.
    lanes.commit(slots, verdict.path[:, :0] if tree.is_chain else verdict.path, verdict.n)
    method.drafter.commit(judgement, verdict)
    levels = method.tree.commit(judgement, verdict)
    table.advance(slots, tokens, verdict.n)
    assert tree.num_drafted is not None
    parts = (tokens, logprobs, verdict.n, tree.num_drafted, verdict.relaxed, levels, tree.failed)
    return StepResult(parts, started, drafted, verified)


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
        logits = warp(drafted, rows, None if rows.seen is None else frontier.path)
        draws = None
        if rows.any_sampled:
            # One draw per depth; with shared noise, the target's choice at this depth uses the same draw.
            draws = noise.gumbel(rule.draft_stream)[:, frontier.depth : frontier.depth + 1]
        level = Level(logits, draws, rows, max_depth)
        frontier = policy.grow(level)
        if not policy.checks_numbers:
            sound.append(level.is_sound)
    tree = policy.finish()
    return replace(tree, failed=~torch.cat(sound, dim=1).flatten(1).all(dim=1)) if sound else tree


def _warp_nodes(tree: DraftTree, raw: Tensor, rows: RowSampling) -> Tensor:
    """Apply penalties and filters to the logits (b, N, V) of all nodes; ancestors count as seen tokens."""
    if rows.seen is None:
        return warp(raw, rows, None)
    visible = tree.visible()
    return warp(raw, rows, tree.tokens[:, None].expand_as(visible), visible)


def path_logprobs(tree: DraftTree, raw: Tensor, verdict: Verdict, tokens: Tensor) -> Tensor:
    """Return the log probabilities (b, D + 1) of `tokens` under the target's logits; undefined beyond `verdict.n`."""
    logits = raw if tree.is_chain else raw.gather(1, verdict.path[:, :, None].expand(-1, -1, raw.shape[-1]))
    return -F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)
