"""The device's side of one step: draft, verify, judge, commit, without once asking the device for a number.

Everything here is tensors of fixed shape and host integers known beforehand, so a step can be traced, compiled and
captured. What the host needs is left in a `StepResult` and read in one go.
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
    """A step's outcome as plain numbers, row by row; `levels` is None where the policy never changes its depth, and
    `failed` where nothing was drafted."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    counts: list[int]
    num_drafted: list[int]
    relaxed: list[list[bool]]
    levels: list[int] | None
    failed: list[bool] | None

    def read(self) -> HostStep:
        """Itself: it has arrived."""
        return self


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device.

    `tokens`, `logprobs` (b, D + 1) are the produced tokens and their probabilities, `n` (b,) how many are real,
    `num_drafted` (b,) valid drafts, `relaxed` (b, D + 1) as in `Verdict`, `levels` (b,) what the next trees want,
    `failed` (b,) as in `DraftTree`.
    `started`, `drafted`, `verified` are host clock readings in seconds.
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
        """Begin the step's one copy to the host; a GPU makes it while further steps are launched."""
        outcome = (self.tokens, self.logprobs, self.n, self.num_drafted, self.relaxed, self.levels, self.failed)
        if self.tokens.device.type == "cpu":
            # Nothing to wait for: read at once, before later steps write to what parts may be views of.
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
    """A step's outcome on its way to the host: `numbers` hold the parts of `outcome`, in order, once `arrived`."""

    outcome: tuple[Tensor | None, ...]
    numbers: Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> HostStep:
        """The step's one look at the device; waits for this step and no later one."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values, start = self.numbers.tolist(), 0
        lists: list[Any] = []
        for part in self.outcome:
            lists.append(None if part is None else _listed(values[start : start + part.numel()], part))
            start += 0 if part is None else part.numel()
        return HostStep(*lists)


def packed(outcome: Sequence[Tensor | None]) -> Tensor:
    """All parts in one tensor, so that there is one copy, in a type that holds each exactly: the first one's, to which
    the rest is promoted."""
    (first, *rest) = (part.flatten() for part in outcome if part is not None)
    return torch.cat([first.double(), *rest])


KINDS: dict[torch.dtype, Callable[[float], Any]] = {torch.long: int, torch.bool: bool}


def _listed(values: list[float], like: Tensor) -> list[Any]:
    """Numbers in the shape (b,) or (b, P) and the type of a tensor."""
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
    # Drafters ask for them too.
    verdict = replace(verdict, said=tokens) if verdict.said is None else verdict
    verified = time.perf_counter()
    # The nodes of a chain stand where they belong already.
    lanes.commit(slots, verdict.path[:, :0] if tree.is_chain else verdict.path, verdict.n)
    method.drafter.commit(judgement, verdict)
    levels = method.tree.commit(judgement, verdict)
    table.advance(slots, tokens, verdict.n)
    assert tree.num_drafted is not None
    outcome = (tokens, logprobs, verdict.n, tree.num_drafted, verdict.relaxed, levels, tree.failed)
    return StepResult(*outcome, started, drafted, verified)


def _warp_nodes(tree: DraftTree, raw: Tensor, rows: RowSampling) -> Tensor:
    """The sampled distribution's logits at every node; its ancestors count as seen."""
    if rows.seen is None:
        return warp(raw, rows, None)
    visible = tree.visible()
    return warp(raw, rows, tree.tokens[:, None].expand_as(visible), visible)


def path_logprobs(tree: DraftTree, raw: Tensor, verdict: Verdict, tokens: Tensor) -> Tensor:
    """Natural-log probability (b, D + 1) of each produced token under the target's raw logits (b, N, V).

    Those of places beyond `verdict.n` are junk, as their tokens are.
    """
    # As in `Verdict.produced`.
    logits = raw if tree.is_chain else raw.gather(1, verdict.path[:, :, None].expand(-1, -1, raw.shape[-1]))
    return -F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)
