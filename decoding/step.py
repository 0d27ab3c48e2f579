"""One step on the device: draft, verify, accept, commit, without synchronising with the host.

Shapes are fixed and host integers are known in advance, so a step can be compiled and captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.contracts import Judgement, Method, StepNoise
from decoding.sampling import RowSampling, warp
from decoding.scheduling.slots import SlotTable
from decoding.tree import DraftTree, Verdict
from decoding.tree_growth import grow_tree
from models.kv.lanes import LaneModel, SlotBatch


@dataclass(frozen=True)
class HostStep:
    """A step's result as host lists by row; see `StepResult`."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    counts: list[int]
    num_drafted: list[int]
    relaxed: list[list[bool]]
    levels: list[int] | None
    failed: list[bool] | None

    def read(self) -> HostStep:
        """Return itself."""
        return self


@dataclass(frozen=True)
class StepResult:
    """A step's result on the device.

    `tokens` and `logprobs` (b, D + 1) are valid up to `n` (b,); `num_drafted` (b,) counts valid drafts; `relaxed`
    (b, D + 1) as in `Verdict`; `levels` (b,) is the next trees' depth, None if it never changes; `failed` (b,) as in
    `DraftTree`, None without drafts. `started`, `drafted`, `verified` are host times in seconds.
    """

    tokens: Tensor
    logprobs: Tensor
    n: Tensor
    num_drafted: Tensor
    relaxed: Tensor
    levels: Tensor | None
    failed: Tensor | None
    started: float
    drafted: float
    verified: float

    def send(self) -> SentStep | HostStep:
        """Start the step's only copy to the host; on a GPU it is asynchronous."""
        outcome = (self.tokens, self.logprobs, self.n, self.num_drafted, self.relaxed, self.levels, self.failed)
        if self.tokens.device.type == "cpu":
            # Read before later steps overwrite tensors that parts may be views of.
            lists: list[Any] = [None if part is None else part.tolist() for part in outcome]
            return HostStep(*lists)
        numbers = packed(outcome)
        if not numbers.is_cuda:
            return SentStep(outcome, numbers, None)
        there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        there.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(numbers.device))
        return SentStep(outcome, there, arrived)


@dataclass(frozen=True)
class SentStep:
    """A result that is being copied: `numbers` holds the parts of `outcome`, in order, once `arrived`."""

    outcome: tuple[Tensor | None, ...]
    numbers: Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> HostStep:
        """Wait for this step, but for no later one."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values, start = self.numbers.tolist(), 0
        lists: list[Any] = []
        for part in self.outcome:
            lists.append(None if part is None else _listed(values[start : start + part.numel()], part))
            start += 0 if part is None else part.numel()
        return HostStep(*lists)


def packed(outcome: Sequence[Tensor | None]) -> Tensor:
    """All parts in one float64 tensor, which represents each exactly."""
    (first, *rest) = (part.flatten() for part in outcome if part is not None)
    return torch.cat([first.double(), *rest])


KINDS: dict[torch.dtype, Callable[[float], Any]] = {torch.long: int, torch.bool: bool}


def _listed(values: list[float], like: Tensor) -> list[Any]:
    """Lists in the shape (b,) or (b, P) and the type of a tensor."""
    kind = KINDS.get(like.dtype)
    found = values if kind is None else list(map(kind, values))
    if like.dim() == 1:
        return found
    width = like.shape[1]
    return [found[start : start + width] for start in range(0, len(found), width)]


def run_step(
    method: Method, lanes: LaneModel, table: SlotTable, slots: SlotBatch, rows: RowSampling, num_levels: int
) -> StepResult:
    """One draft → verify → accept → commit for `slots`, with trees of at most `num_levels`."""
    started = time.perf_counter()
    noise = StepNoise(table.noise(slots), num_levels + 1, table.vocab_size)
    max_depth = table.max_depth(slots)
    tree = grow_tree(
        method.drafter,
        method.tree,
        slots,
        slots.of(table.root),
        num_levels,
        rows,
        noise,
        method.acceptance.draft_stream,
        method.acceptance.needs_draft_probs,
        max_depth,
    ).within(max_depth)
    drafted = time.perf_counter()
    hidden = lanes.forward(slots, tree.tokens, tree.depth, tree.visible())
    raw = table.guidance.merge(slots, lanes.logits(hidden), tree.depth)
    judgement = Judgement(slots, tree, raw, _warp_nodes(tree, raw, rows), hidden, noise, rows)
    verdict = method.acceptance.judge(judgement)
    tokens = verdict.produced(tree)
    logprobs = path_logprobs(tree, raw, verdict, tokens) if verdict.logprobs is None else verdict.logprobs
    # Drafters use them as well.
    verdict = replace(verdict, said=tokens) if verdict.said is None else verdict
    verified = time.perf_counter()
    # The nodes of a chain are in place already.
    lanes.commit(slots, verdict.path[:, :0] if tree.is_chain else verdict.path, verdict.n)
    method.drafter.commit(judgement, verdict)
    levels = method.tree.commit(judgement, verdict)
    table.advance(slots, tokens, verdict.n)
    assert tree.num_drafted is not None
    outcome = (tokens, logprobs, verdict.n, tree.num_drafted, verdict.relaxed, levels, tree.failed)
    return StepResult(*outcome, started, drafted, verified)


def _warp_nodes(tree: DraftTree, raw: Tensor, rows: RowSampling) -> Tensor:
    """Logits after penalties and filters at every node; its ancestors count as seen."""
    if rows.seen is None:
        return warp(raw, rows, None)
    visible = tree.visible()
    return warp(raw, rows, tree.tokens[:, None].expand_as(visible), visible)


def path_logprobs(tree: DraftTree, raw: Tensor, verdict: Verdict, tokens: Tensor) -> Tensor:
    """Log probability (b, D + 1) of each produced token under the target's raw logits (b, N, V); undefined beyond
    `verdict.n`."""
    logits = raw if tree.is_chain else raw.gather(1, verdict.path[:, :, None].expand(-1, -1, raw.shape[-1]))
    return -F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)
