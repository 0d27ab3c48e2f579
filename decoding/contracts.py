"""Interfaces of a method's parts (drafter, contexts, tree policy, acceptance rule) and the values of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decoding.controllers.base import Controller, FixedDepth
from decoding.guidance import Guidance
from decoding.noise import Noise, Stream
from decoding.sampling import RowSampling
from decoding.tree import DraftTree, Frontier, Verdict
from decoding.types import Request
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch


class StepNoise:
    """Cached noise of one step, shared by tree policy and acceptance; depth d is the token after a node of depth d."""

    def __init__(self, noise: Noise, num_depths: int, vocab_size: int) -> None:
        self._noise = noise
        self._num_depths = num_depths
        self._vocab_size = vocab_size
        self._cache: dict[Stream, Tensor] = {}

    def gumbel(self, stream: Stream) -> Tensor:
        """Gumbel noise (b, depths, V) of a stream."""
        if stream not in self._cache:
            self._cache[stream] = self._noise.gumbel(stream, self._ahead(), self._vocab_size)
        return self._cache[stream]

    def uniform(self, stream: Stream, sibling: int = 0) -> Tensor:
        """Uniform numbers (b, depths) of a stream for one sibling."""
        return self._noise.uniform(stream, self._ahead(), sibling)

    def _ahead(self) -> Tensor:
        return torch.arange(self._num_depths, device=self._noise.keys.device)


@dataclass(frozen=True)
class EngineSpec:
    """Engine parameters for parts that allocate state.

    `special_ids` are EOS, placeholders and other tokens without text, which relaxed rules never accept.
    `token_embeddings` (V, D) is the target's input embedding, `num_lanes` the target's rows per sample, merged by
    `guidance`. At most `max_missed_tokens` tokens of a sample have no drafts before drafting continues.
    `max_prefill_tokens` bounds the tokens of one prefill forward, None for no bound.
    """

    num_slots: int
    max_context_tokens: int
    vocab_size: int
    hidden_size: int
    device: torch.device
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    max_frontier_nodes: int
    max_grown_nodes: int
    max_levels: int
    token_embeddings: Tensor | None = None
    num_lanes: int = 1
    guidance: Guidance | None = None
    max_missed_tokens: int = 0
    max_prefill_tokens: int | None = None


@dataclass(frozen=True)
class Probe:
    """Outputs of the target's prefill of one sample.

    `prefix` is its first lane's prompt; `hidden` (R, L, D) are the last hidden states of all lanes after the norm;
    `attention` (L,) is the mean attention to each position over layers, heads and the text after the last image. Both
    are None unless a part needs them.
    """

    prefix: Prefix
    hidden: Tensor | None = None
    attention: Tensor | None = None

    def outline(self) -> Probe:
        """The same without embeddings and hidden states, for contexts."""
        return Probe(self.prefix.outline(), None, self.attention)


@dataclass(frozen=True)
class Level:
    """A drafter's output for a frontier: `given` (b, F, V) logits after penalties and filters, and `noise` (b, 1, V)
    that ranks children on sampled rows, None if no row samples.

    Nodes with NaN logits get no children. `max_depth` (b,) is the deepest useful draft of each row; a policy that
    compares nodes of different depths must ignore deeper ones, because they depend on the rest of the batch.
    """

    given: Tensor
    noise: Tensor | None
    rows: RowSampling
    max_depth: Tensor | None = None
    # Cache of `is_sound`.
    _sound: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def is_sound(self) -> Tensor:
        """Nodes with finite logits, (b, F, 1)."""
        if not self._sound:
            self._sound.append(self.given.amax(dim=-1, keepdim=True) < torch.inf)  # false for NaN too
        return self._sound[0]

    @property
    def logits(self) -> Tensor:
        """The logits, −inf for nodes that are not sound."""
        return torch.where(self.is_sound, self.given, -torch.inf)

    def probs(self) -> Tensor:
        """Distributions (b, F, V) of children; zeros for nodes without candidates."""
        logits = self.logits
        return torch.where(logits.amax(dim=-1, keepdim=True) > -torch.inf, logits.softmax(dim=-1), 0.0)


@dataclass(frozen=True)
class Judgement:
    """The target's outputs for a tree: input of acceptance rules and of `commit`.

    `raw` and `warped` (b, N, V) are logits after the lane merge, before and after penalties and filters; `hidden`
    (b, R, N, D) are the target's last hidden states after its norm; `noise` is the step's noise.
    """

    slots: SlotBatch
    tree: DraftTree
    raw: Tensor
    warped: Tensor
    hidden: Tensor
    noise: StepNoise
    rows: RowSampling


class Context:
    """Builds the prompt of one drafter lane."""

    needs_attention: bool = False
    """Whether the target's prefill must record attention."""

    def build(self, request: Request, probe: Probe, model: Any) -> Prefix:
        """The lane's prompt, encoded by the drafter `model`."""
        raise NotImplementedError


class Drafter:
    """Drafts tokens. The defaults are those of a drafter without prompts and state."""

    name: str
    num_forwards: int = 0
    needs_hidden: bool = False
    needs_attention: bool = False

    def open(self, spec: EngineSpec) -> None:
        """Allocate state."""

    def prefixes(self, request: Request, probe: Probe) -> list[Prefix]:
        """The sample's prompt for each lane. The probe is outlined."""
        return []

    def admit(self, slots: SlotBatch, first: Tensor, probes: Sequence[Probe]) -> None:
        """Assign new samples to `slots`; `first` (b,) are the target's first tokens. Prefill comes later."""

    def prefill(self, slots: SlotBatch, prefixes: Sequence[list[Prefix]]) -> None:
        """Prefill `prefixes[i][lane]` of admitted samples before their first draft.

        After an exception it may be called again with fewer samples.
        """

    def skip(self, slots: SlotBatch) -> None:
        """Mark admitted samples whose prefill failed: they take part in steps, but their drafts are not used."""

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        """Logits (b, F, V) of the frontier's children; at the root, first catches up on missed tokens."""
        raise NotImplementedError

    def commit(self, judgement: Judgement, verdict: Verdict) -> None:
        """Keep accepted positions, drop the others, and update statistics. A step without drafts runs no model: its
        token is stored until the next draft."""

    def extras(self, slot: int) -> dict[str, Any]:
        """Telemetry extras of the sample."""
        return {}


class TreePolicy:
    """Builds the draft tree level by level. The defaults are those of a policy without per-sample state."""

    max_levels: int
    max_nodes: int
    max_frontier_nodes: int
    """Most nodes, without the root, that the drafter forwards in one step."""
    max_grown_nodes: int
    checks_numbers: bool = False
    """Whether the policy sets `DraftTree.failed` itself, from `Level.given`; otherwise it uses `Level.logits`."""

    def open(self, spec: EngineSpec) -> None:
        """Allocate per-slot state."""

    def reset(self, slots: SlotBatch) -> None:
        """Reset the state of the slots."""

    def start(self, slots: SlotBatch, root: Tensor, num_levels: int, keep_probs: bool) -> Frontier:
        """Start a tree of at most `num_levels` under `root` (b,); `keep_probs` requests `DraftTree.draft_probs`."""
        raise NotImplementedError

    def grow(self, level: Level) -> Frontier | None:
        """Select children; returns the next frontier, or None if the tree is complete."""
        raise NotImplementedError

    def finish(self) -> DraftTree:
        """The tree to verify."""
        raise NotImplementedError

    def commit(self, judgement: Judgement, verdict: Verdict) -> Tensor | None:
        """Update statistics; returns the depth (b,) of each row's next tree, or None for `max_levels`."""
        return None

    def extras(self, slot: int) -> dict[str, Any]:
        """Telemetry extras of the sample."""
        return {}


class Acceptance:
    """Decides which drafts are accepted. The defaults are those of a lossless rule without per-sample state."""

    lossless: bool = True
    draft_stream: Stream = Stream.TOKEN
    """Noise that ranks drafts: that of the token (shared noise) or an independent one (rejection sampling)."""
    needs_draft_probs: bool = False
    needs_hidden: bool = False
    """Whether `admit` needs the prefill's hidden states."""

    def open(self, spec: EngineSpec) -> None:
        """Allocate per-slot state."""

    def admit(self, slots: SlotBatch, probes: Sequence[Probe]) -> None:
        """Assign new samples to `slots`."""

    def judge(self, judgement: Judgement) -> Verdict:
        """The accepted path and the next token."""
        raise NotImplementedError


@dataclass(frozen=True)
class Method:
    """One speculative-decoding method; plain decoding uses the drafter `none`. The controller limits the depth."""

    drafter: Drafter
    tree: TreePolicy
    acceptance: Acceptance
    controller: Controller = field(default_factory=FixedDepth)
