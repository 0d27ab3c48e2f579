"""Defines the interfaces of drafters, contexts, tree policies and acceptance rules, and the data of one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decoding.constraints import Constraints
from decoding.controllers.base import Controller
from decoding.guidance import Guidance
from decoding.noise import Noise, Stream
from decoding.sampling import RowSampling
from decoding.tree import AcceptanceResult, DraftTree, Frontier
from decoding.types import Request
from models.inputs.prefix import Prefix
from models.inputs.prompt_prefetch import Prompt
from models.kv.lanes import LaneModel, SlotBatch


class StepNoise:
    """Noise of one step, cached and shared by tree policy and acceptance; index d is for the token after depth d."""

    def __init__(self, noise: Noise, num_depths: int, vocab_size: int) -> None:
        self._noise = noise
        self._num_depths = num_depths
        self._vocab_size = vocab_size
        self._cache: dict[Stream, Tensor] = {}

    def gumbel(self, stream: Stream) -> Tensor:
        """Return the Gumbel noise (b, depths, V) of a stream."""
        if stream not in self._cache:
            self._cache[stream] = self._noise.gumbel(stream, self._ahead(), self._vocab_size)
        return self._cache[stream]

    def uniform(self, stream: Stream, sibling: int = 0) -> Tensor:
        """Return uniform numbers (b, depths) of a stream for one sibling."""
        return self._noise.uniform(stream, self._ahead(), sibling)

    def _ahead(self) -> Tensor:
        return torch.arange(self._num_depths, device=self._noise.keys.device)


@dataclass(frozen=True)
class EngineSpec:
    """Engine parameters from which drafters, tree policies and acceptance rules allocate their state.

    `special_ids` are EOS, placeholders and other tokens without text, which relaxed rules never relax.
    `token_embeddings` (V, D) is the target's input embedding, `num_lanes` the target's KV cache rows per sample, whose
    logits `guidance` merges. While drafting is paused, a sample generates at most `max_missed_tokens` tokens.
    `max_prefill_tokens` limits the tokens of one prefill forward; None is no limit. `lanes` is the target over its KV
    cache, for drafters with `shares_cache`; it is None in tests of single parts. `constraints` are the
    grammars of the slots; `max_siblings` is that of the tree policy.
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
    lanes: LaneModel | None = None
    constraints: Constraints | None = None
    max_siblings: int | None = None


@dataclass(frozen=True)
class PrefillOutput:
    """Outputs of the target's prefill of one sample.

    `prefix` is the prompt of the first lane; `hidden` (R, L, D) are the last hidden states of all lanes after the final
    norm; `attention` (L,) is the attention to each prompt position, averaged over layers, heads and the text tokens
    after the last image; `features` (R, L, F) are the states of the drafter's `feature_layers`. All but `prefix` are
    None unless the method needs them.
    """

    prefix: Prefix
    hidden: Tensor | None = None
    attention: Tensor | None = None
    features: Tensor | None = None

    def outline(self) -> PrefillOutput:
        """Return a copy without embeddings, hidden states and features, for contexts."""
        return PrefillOutput(self.prefix.outline(), None, self.attention)


@dataclass(frozen=True)
class DraftLogits:
    """A drafter's output for a frontier: `given` (b, F, V) are the logits after penalties and filters.

    `noise` (b, 1, V) is added to rank the children of sampled rows, None if no row samples. Nodes with NaN or +inf
    logits get no children. `max_depth` (b,) is the deepest useful draft of each row; a policy that compares nodes of
    different depths must ignore deeper nodes, because they depend on the other rows of the batch.
    """

    given: Tensor
    noise: Tensor | None
    rows: RowSampling
    max_depth: Tensor | None = None
    # Cache of `is_sound`; Dynamo does not trace cached properties.
    _sound: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def is_sound(self) -> Tensor:
        """Mask (b, F, 1) of the nodes whose logits contain neither NaN nor +inf."""
        if not self._sound:
            self._sound.append(self.given.amax(dim=-1, keepdim=True) < torch.inf)  # false for NaN too
        return self._sound[0]

    @property
    def logits(self) -> Tensor:
        """Logits (b, F, V), all −inf at nodes that are not sound."""
        return torch.where(self.is_sound, self.given, -torch.inf)

    def probs(self) -> Tensor:
        """Return the distributions (b, F, V) of children; zeros for nodes whose logits are all −inf."""
        logits = self.logits
        return torch.where(logits.amax(dim=-1, keepdim=True) > -torch.inf, logits.softmax(dim=-1), 0.0)


@dataclass(frozen=True)
class VerificationOutput:
    """The target's outputs for a draft tree, the input of acceptance rules and of `commit`.

    `target_logits` (b, N, V) are the logits after the lane merge, −inf for tokens that a grammar forbids,
    `processed_logits` (b, N, V) the same after penalties and filters; `hidden` (b, R, N, D) are the target's last
    hidden states after its final norm, `features` (b, R, N, F) the states of the drafter's `feature_layers`.
    `has_grammar` is whether a grammar masks logits of any row.
    """

    slots: SlotBatch
    tree: DraftTree
    target_logits: Tensor
    processed_logits: Tensor
    hidden: Tensor
    features: Tensor
    noise: StepNoise
    rows: RowSampling
    has_grammar: bool = False
    # Cache of `decoding.acceptance.walk.target_choice`.
    choices: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)


class Context(ABC):
    """Interface that builds the prompt of one drafter lane."""

    needs_attention: bool = False
    """Whether the target's prefill must record attention."""

    @abstractmethod
    def build(self, request: Request, prefill_output: PrefillOutput, model: Any) -> Prefix:
        """Return the lane's prompt, encoded by the drafter `model`."""

    def encodes_whole(self, model: Any) -> bool:
        """Whether `build` calls `encode` or `encode_lanes` of `model` with the whole prompt."""
        return False


class Drafter(ABC):
    """Interface of drafters. The default methods suit a drafter without prompts and without per-sample state."""

    name: str
    num_forwards: int = 0
    feature_layers: tuple[int, ...] = ()
    """States of the target that the drafter reads, see `models.kv.feature_layers`; empty for none."""
    needs_attention: bool = False
    shares_cache: bool = False
    """Whether `draft` runs nodes in scratch positions of the target's KV cache."""

    def open(self, spec: EngineSpec) -> None:
        """Allocate state."""

    def allocate(self) -> None:
        """Allocate KV caches that the first prefill would allocate, so that steps can be recorded before it."""

    def encoded_ahead(self, prompts: Sequence[Prompt]) -> AbstractContextManager[None]:
        """Encode images of several prompts together for the calls of `prefixes` within the `with` block."""
        return nullcontext()

    def prefixes(self, request: Request, prefill_output: PrefillOutput) -> list[Prefix]:
        """Return the sample's prompt for each lane; `prefill_output` is a result of `PrefillOutput.outline`."""
        return []

    def admit(self, slots: SlotBatch, first: Tensor, prefill_outputs: Sequence[PrefillOutput]) -> None:
        """Assign new samples to `slots`; `first` (b,) are the target's first output tokens. `prefill` follows later."""

    def prefill(self, slots: SlotBatch, prefixes: Sequence[list[Prefix]]) -> None:
        """Prefill `prefixes[i][lane]` of admitted samples before their first draft.

        After an exception it may be called again with fewer samples.
        """

    def skip(self, slots: SlotBatch) -> None:
        """Mark admitted samples whose prefill failed: they remain in the batch, but their drafts are not used."""

    @abstractmethod
    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        """Return the logits (b, F, V) of the frontier's children; at the root, first run the tokens not run yet."""

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> None:
        """Keep the KV positions of accepted drafts, drop the rest, and update statistics. After a step without drafts,
        run no model but store the new token until the next draft."""

    def replay_key(self, slots: SlotBatch, num_levels: int) -> Hashable | None:
        """Return the host state that the kernels of `draft` and `commit` depend on in a step of `num_levels` levels;
        None if such a step cannot be replayed, see `decoding.scheduling.replay`. After a failed recording, in which no
        kernels ran, the step runs again."""
        return None

    def replayed(self, slots: SlotBatch, num_levels: int) -> None:
        """Change the host state as a step does whose kernels were replayed."""

    def count_forwards(self, number: int) -> None:
        """Add to `num_forwards`."""
        self.num_forwards += number

    def finished(self, token_ids: Sequence[int]) -> None:
        """Note the tokens of an output that has ended, EOS included. The engine calls it between steps, in the order in
        which outputs end, and not for failed requests."""

    def extras(self, slot: int) -> dict[str, Any]:
        """Return telemetry extras of the sample."""
        return {}


class TreePolicy(ABC):
    """Interface that builds draft trees level by level. The default methods suit a policy without per-sample state."""

    max_levels: int
    max_nodes: int
    max_frontier_nodes: int
    """Maximum number of nodes, the root excluded, that the drafter runs in one step."""
    max_grown_nodes: int
    max_siblings: int | None = None
    """Maximum number of children of a node; None if unknown. With 1, all trees are chains."""
    checks_numbers: bool = False
    """Whether the policy reads `DraftLogits.given` and sets `DraftTree.failed`, instead of `DraftLogits.logits`."""

    def num_scratch(self, shares_cache: bool) -> int:
        """Return the scratch positions that a step uses in the target's KV cache; see `Drafter.shares_cache`."""
        return max(self.max_nodes, 1 + self.max_frontier_nodes) if shares_cache else self.max_nodes

    def open(self, spec: EngineSpec) -> None:
        """Allocate per-slot state."""

    def reset(self, slots: SlotBatch) -> None:
        """Reset the state of the slots."""

    @abstractmethod
    def start(self, slots: SlotBatch, root: Tensor, num_levels: int, keep_probs: bool) -> Frontier:
        """Start trees of at most `num_levels` levels; `keep_probs` requests `DraftTree.draft_probs`.

        `root` (b,) are the pending tokens: the last generated token of each row, not yet in the KV cache.
        """

    @abstractmethod
    def grow(self, draft_logits: DraftLogits) -> Frontier | None:
        """Select children of the frontier; return the next frontier, or None if the tree is complete."""

    @abstractmethod
    def finish(self) -> DraftTree:
        """Return the trees to verify."""

    def replay_key(self, slots: SlotBatch) -> Hashable | None:
        """Return the host state that a step's kernels depend on; None if it cannot be replayed."""
        return ()

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> Tensor | None:
        """Update statistics; return the depth (b,) of each row's next tree, or None for an unchanged depth."""
        return None

    def extras(self, slot: int) -> dict[str, Any]:
        """Return telemetry extras of the sample."""
        return {}


class Acceptance(ABC):
    """Interface of acceptance rules. The default methods suit a lossless rule without per-sample state."""

    lossless: bool = True
    draft_stream: Stream = Stream.TOKEN
    """Noise stream that ranks drafts: the target's own (shared noise) or an independent one (rejection sampling)."""
    needs_draft_probs: bool = False
    needs_hidden: bool = False
    """Whether `admit` needs the prefill's hidden states."""

    def open(self, spec: EngineSpec) -> None:
        """Allocate per-slot state."""

    def admit(self, slots: SlotBatch, prefill_outputs: Sequence[PrefillOutput]) -> None:
        """Assign new samples to `slots`."""

    def replay_key(self, slots: SlotBatch) -> Hashable | None:
        """Return the host state that the kernels of `accept` depend on; None if they cannot be replayed."""
        return ()

    @abstractmethod
    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        """Return the accepted path and the target's next token."""


@dataclass(frozen=True)
class Method:
    """A speculative-decoding method. Plain decoding uses the drafter `none`; the controller limits the tree depth."""

    drafter: Drafter
    tree: TreePolicy
    acceptance: Acceptance
    controller: Controller = field(default_factory=Controller)
