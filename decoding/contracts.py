"""The four seams of a method, and what one step hands across them.

A method is a drafter × its contexts × a tree policy × an acceptance rule. Everything here is a contract: the families'
modules implement it, `decoding.engine` drives it, and nothing else is between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
    """The draws of one step, made at most once each and shared by policy and acceptance.

    Depth d holds the noise of the token that follows a node of depth d.
    """

    def __init__(self, noise: Noise, num_depths: int, vocab_size: int) -> None:
        self._noise = noise
        self._num_depths = num_depths
        self._vocab_size = vocab_size
        self._made: dict[Stream, Tensor] = {}

    def gumbel(self, stream: Stream) -> Tensor:
        """Gumbel noise (b, depths, V) of a stream."""
        if stream not in self._made:
            self._made[stream] = self._noise.gumbel(stream, self._ahead(), self._vocab_size)
        return self._made[stream]

    def uniform(self, stream: Stream, sibling: int = 0) -> Tensor:
        """Uniform numbers (b, depths) of a stream for one sibling."""
        return self._noise.uniform(stream, self._ahead(), sibling)

    def _ahead(self) -> Tensor:
        return torch.arange(self._num_depths, device=self._noise.keys.device)


@dataclass(frozen=True)
class EngineSpec:
    """What a part needs to know of its engine when memory is made.

    `special_ids` are EOS, placeholders and every other token that is no text; relaxed rules leave them alone.
    `token_embeddings` (V, D) is the target's own input table, `num_lanes` the target's rows of one sample and
    `guidance` what merges them, for drafters that have the same. `max_missed_tokens` is how many tokens a sample may
    get without drafts before it gets some again: 0 where drafts stop only with the last step. `max_prefill_tokens`
    bounds the columns of one forward over prompts, None for all at once.
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
    """What the target's prefill of one sample left behind, for those who ask.

    `prefix` is its first lane's prompt; `hidden` (R, L, D) are the last states of all lanes after the norm; `attention`
    (L,) is the mean attention, over layers, heads and the text columns that follow the last image, to each column.
    Either is None unless some part needs it.
    """

    prefix: Prefix
    hidden: Tensor | None = None
    attention: Tensor | None = None

    def outline(self) -> Probe:
        """What contexts look at, without the embeddings and states that would be held for it."""
        return Probe(self.prefix.outline(), None, self.attention)


@dataclass(frozen=True)
class Level:
    """What a drafter says about a frontier: `given` (b, F, V) logits, penalties and filters applied; and `noise`
    (b, 1, V) by which children are ranked on sampled rows (None when no row samples).

    What is given may be no numbers, of which `logits` makes nodes without children. `max_depth` (b,) is the deepest
    draft that each row has a use for: a policy that weighs nodes of different depths against each other leaves deeper
    ones out, or a row's tree would depend on its neighbours' lengths.
    """

    given: Tensor
    noise: Tensor | None
    rows: RowSampling
    max_depth: Tensor | None = None
    # What `is_sound` has computed, as several ask.
    _sound: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def is_sound(self) -> Tensor:
        """Which nodes' logits are numbers, (b, F, 1)."""
        if not self._sound:
            self._sound.append(self.given.amax(dim=-1, keepdim=True) < torch.inf)  # false for NaN too
        return self._sound[0]

    @property
    def logits(self) -> Tensor:
        """What is given, −inf throughout where it is not sound, as if a look-up had found nothing."""
        return torch.where(self.is_sound, self.given, -torch.inf)

    def probs(self) -> Tensor:
        """The distributions (b, F, V) that children are drawn from; zeros where there is no candidate."""
        logits = self.logits
        return torch.where(logits.amax(dim=-1, keepdim=True) > -torch.inf, logits.softmax(dim=-1), 0.0)


@dataclass(frozen=True)
class Judgement:
    """All that an acceptance rule may look at, and what drafter and policy learn from afterwards.

    `raw` and `warped` (b, N, V) logits after the lane merge, before and after penalties and filters; `hidden`
    (b, R, N, D) the target's last states after its norm; `noise` the step's draws.
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

    needs_attention: bool
    """Whether the target's prefill must record attention to the visual columns."""

    def build(self, request: Request, probe: Probe, model: Any) -> Prefix:
        """The lane's prompt under the drafter's own front end; `model` is the family's that the context is for."""
        ...


class Drafter(Protocol):
    """Guesses what the target will say."""

    name: str
    needs_hidden: bool
    needs_attention: bool

    @property
    def num_forwards(self) -> int:
        """Model passes so far, over all slots together."""
        ...

    def open(self, spec: EngineSpec) -> None:
        """Make memory."""
        ...

    def prefixes(self, request: Request, probe: Probe) -> list[Prefix]:
        """The sample's prompt for each lane; none for drafters without prompts of their own. The probe is outlined."""
        ...

    def admit(self, slots: SlotBatch, first: Tensor, probes: Sequence[Probe]) -> None:
        """Take fresh samples into `slots`; `first` (b,) are the target's first tokens. Prompts are not read yet."""
        ...

    def prefill(self, slots: SlotBatch, prefixes: Sequence[list[Prefix]]) -> None:
        """Read the prompts `prefixes[i][lane]` of samples that were admitted before, and not drafted for yet.

        May be called again, with fewer samples, after it has failed.
        """
        ...

    def skip(self, slots: SlotBatch) -> None:
        """Samples that were admitted and whose prompts cannot be read: until others are admitted to these slots, they
        take part in steps, and none of their drafts is used."""
        ...

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        """Logits (b, F, V) for the children of the frontier; at the root, after catching up on what was missed."""
        ...

    def commit(self, judgement: Judgement, verdict: Verdict) -> None:
        """Follow the target: keep what was accepted, drop the rest, learn from both. After a step without drafts there
        is nothing to learn, and a model is not run: its token is remembered until the next draft."""
        ...

    def extras(self, slot: int) -> dict[str, Any]:
        """What the sample's telemetry should say of the drafter."""
        ...


class TreePolicy(Protocol):
    """Decides which drafts are proposed, level by level."""

    max_levels: int
    max_nodes: int
    max_frontier_nodes: int
    """Most nodes, the root left out, that are forwarded by the drafter in one step, all levels together."""
    max_grown_nodes: int
    checks_numbers: bool
    """Whether trees say themselves which rows `failed`, from levels' `given`; otherwise policies read `logits`."""

    def open(self, spec: EngineSpec) -> None:
        """Make per-slot memory."""
        ...

    def reset(self, slots: SlotBatch) -> None:
        """Forget what was learned from the slots' former samples."""
        ...

    def start(self, slots: SlotBatch, root: Tensor, num_levels: int, keep_probs: bool) -> Frontier:
        """Begin a tree of at most `num_levels` under `root` (b,); `keep_probs` asks for `DraftTree.draft_probs`."""
        ...

    def grow(self, level: Level) -> Frontier | None:
        """Pick the frontier's children; the next frontier, or None when the tree is complete."""
        ...

    def finish(self) -> DraftTree:
        """The tree to verify."""
        ...

    def commit(self, judgement: Judgement, verdict: Verdict) -> Tensor | None:
        """Learn from a step; levels (b,) that each row's next tree wants, or None for `max_levels`."""
        ...

    def extras(self, slot: int) -> dict[str, Any]:
        """What the sample's telemetry should say of its trees."""
        ...


class Acceptance(Protocol):
    """Decides which drafts the target takes."""

    lossless: bool
    draft_stream: Stream
    """Whose noise ranks the drafts: the token's own (shared noise), or an independent one (rejection sampling)."""
    needs_draft_probs: bool
    needs_hidden: bool
    """Whether `admit` must be given the prefill's hidden states."""

    def open(self, spec: EngineSpec) -> None:
        """Make per-slot memory."""
        ...

    def admit(self, slots: SlotBatch, probes: Sequence[Probe]) -> None:
        """Take fresh samples into `slots`."""
        ...

    def judge(self, judgement: Judgement) -> Verdict:
        """The accepted path and the token after it."""
        ...


class StatelessRule:
    """An acceptance rule that remembers nothing of its samples; rules derive from it."""

    lossless = True
    draft_stream = Stream.TOKEN
    needs_draft_probs = False
    needs_hidden = False

    def open(self, spec: EngineSpec) -> None:
        pass

    def admit(self, slots: SlotBatch, probes: Sequence[Probe]) -> None:
        pass


class StatelessTree:
    """A tree policy that remembers nothing of its samples; policies derive from it."""

    checks_numbers = False

    def open(self, spec: EngineSpec) -> None:
        pass

    def reset(self, slots: SlotBatch) -> None:
        pass

    def commit(self, judgement: Judgement, verdict: Verdict) -> Tensor | None:
        return None

    def extras(self, slot: int) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Method:
    """One speculative-decoding method; plain decoding is drafter `none`. The controller may keep its trees shallow."""

    drafter: Drafter
    tree: TreePolicy
    acceptance: Acceptance
    controller: Controller = field(default_factory=FixedDepth)
