"""The four seams of a method, and what one step hands across them.

A method is a drafter × its contexts × a tree policy × an acceptance rule. Everything here is a contract: the families'
modules implement it, `decoding.engine` drives it, and nothing else is between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decoding.noise import Noise, Stream
from decoding.sampling import RowSampling
from decoding.tree import DraftTree, Frontier, Verdict
from decoding.types import Request
from models.lanes import SlotBatch
from models.prefix import Prefix
from models.target import Target


class StepNoise:
    """The draws of one step, made at most once each and shared by policy and acceptance.

    Depth d holds the noise of the token that follows a node of depth d.
    """

    def __init__(self, noise: Noise, num_depths: int, vocab_size: int) -> None:
        self._noise = noise
        self._ahead = torch.arange(num_depths, device=noise.keys.device)
        self._vocab_size = vocab_size
        self._made: dict[Stream, Tensor] = {}

    def gumbel(self, stream: Stream) -> Tensor:
        """Gumbel noise (b, depths, V) of a stream."""
        if stream not in self._made:
            self._made[stream] = self._noise.gumbel(stream, self._ahead, self._vocab_size)
        return self._made[stream]

    def uniform(self, stream: Stream, sibling: int = 0) -> Tensor:
        """Uniform numbers (b, depths) of a stream for one sibling."""
        return self._noise.uniform(stream, self._ahead, sibling)


@dataclass(frozen=True)
class Level:
    """What a drafter says about a frontier: `logits` (b, F, V), penalties and filters applied; and `noise` (b, 1, V) by
    which children are ranked on sampled rows (None when no row samples)."""

    logits: Tensor
    noise: Tensor | None
    rows: RowSampling


@dataclass(frozen=True)
class Judgement:
    """All that an acceptance rule may look at.

    `raw` and `warped` (b, N, V) logits after the lane merge, before and after penalties and filters; `hidden`
    (b, R, N, D) the target's last states after its norm; `depth_noise` the step's draws.
    """

    slots: SlotBatch
    tree: DraftTree
    raw: Tensor
    warped: Tensor
    hidden: Tensor
    noise: StepNoise
    rows: RowSampling


class Context(Protocol):
    """What one drafter lane sees of a sample."""

    def build(self, request: Request, model: Target) -> Prefix:
        """The lane's prompt under the drafter's own front end."""
        ...


class Drafter(Protocol):
    """Guesses what the target will say."""

    name: str
    num_forwards: int
    """Model passes so far, over all slots together."""

    def open(self, num_slots: int, max_context_tokens: int, max_frontier_nodes: int, max_grown_nodes: int) -> None:
        """Make memory for `num_slots` samples."""
        ...

    def prefixes(self, request: Request) -> list[Prefix]:
        """The sample's prompt for each lane."""
        ...

    def admit(self, slots: SlotBatch, prefixes: Sequence[list[Prefix]], first: Tensor) -> None:
        """Take fresh samples into `slots`; `first` (b,) are the target's first tokens."""
        ...

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        """Logits (b, F, V) for the children of the frontier."""
        ...

    def commit(self, slots: SlotBatch, tree: DraftTree, verdict: Verdict) -> None:
        """Follow the target: keep what was accepted, drop the rest."""
        ...

    def wipe(self, slots: SlotBatch) -> None:
        """Erase what slots hold that saw numbers that are not finite."""
        ...


class TreePolicy(Protocol):
    """Decides which drafts are proposed, level by level."""

    max_levels: int
    max_nodes: int
    max_frontier_nodes: int
    max_grown_nodes: int

    def start(self, slots: SlotBatch, root: Tensor, num_levels: int, keep_probs: bool) -> Frontier:
        """Begin a tree of at most `num_levels` under `root` (b,); `keep_probs` asks for `DraftTree.draft_probs`."""
        ...

    def grow(self, level: Level) -> Frontier | None:
        """Pick the frontier's children; the next frontier, or None when the tree is complete."""
        ...

    def finish(self) -> DraftTree:
        """The tree to verify."""
        ...


class Acceptance(Protocol):
    """Decides which drafts the target takes."""

    lossless: bool
    draft_stream: Stream
    """Whose noise ranks the drafts: the token's own (shared noise), or an independent one (rejection sampling)."""
    needs_draft_probs: bool

    def judge(self, judgement: Judgement) -> Verdict:
        """The accepted path and the token after it."""
        ...


@dataclass(frozen=True)
class Method:
    """One speculative-decoding method; plain decoding is drafter `none`."""

    drafter: Drafter
    tree: TreePolicy
    acceptance: Acceptance
