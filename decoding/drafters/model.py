"""Drafts with an independent smaller model, with one KV cache row per context and sample.

Its KV cache lacks the tokens that the model has not run (pending tokens): always the last generated token, also the
last accepted draft if it was a leaf, and all tokens generated while drafting was paused. The first forward of the next
draft runs them; their number differs by row.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from decoding.contracts import Context, Drafter, EngineSpec, PrefillOutput, VerificationOutput
from decoding.drafters.merge import Merge, SingleLane, to_vocabulary
from decoding.drafters.scratch import ScratchNodes
from decoding.tree import AcceptanceResult, Frontier
from decoding.types import Request
from models.contract import TargetModel
from models.inputs.prefix import Prefix
from models.inputs.prompt_prefetch import Prompt
from models.kv.lanes import SlotBatch

NARROWEST = 2
"""Minimum tokens per row of a catch-up forward: the maximum that a step with drafts leaves to run."""
WIDEST = 128
"""Maximum tokens per row of a catch-up forward; more are not faster, and the mask grows quadratically."""
CATCH_UP = 2
"""Tokens of the catch-up forward after a step with drafts: an accepted leaf and the last generated token."""


class ModelDrafter(Drafter):
    """Drafter with a language `model`; `vocab_size` is the target's. Ids in both vocabularies must be equal tokens.

    State per slot: `_pending` (S, P), tokens not run yet, and `_num_pending` (S,), their number, at least 1, with the
    upper bound `_most_pending` on the host. State per step: `_nodes`, the nodes in scratch positions.
    """

    name = "model"

    def __init__(
        self, model: TargetModel, contexts: Sequence[Context], vocab_size: int, merge: Merge | None = None
    ) -> None:
        self.merge = merge or SingleLane()
        self.model = model
        self.contexts = tuple(contexts)
        self.vocab_size = vocab_size
        self.needs_attention = any(context.needs_attention for context in contexts)

    def open(self, spec: EngineSpec) -> None:
        if self.model.prompt_thread is not None:
            raise ValueError(
                f"{self.model.name}: a drafter's prompts are made between steps, not on a thread; where the target is "
                "its own drafter, load it twice"
            )
        num_slots = spec.num_slots
        # One more than can be missed, because the last step of a batch also has no drafts.
        most_pending = CATCH_UP + 1 + spec.max_missed_tokens
        widest = max(width for _, width in catch_up_widths(most_pending))
        capacity = spec.max_context_tokens + max(spec.max_frontier_nodes, widest) + CATCH_UP
        self.lanes = self.model.lanes(num_slots, len(self.contexts), capacity)
        self.lanes.check_siblings(spec.max_siblings, self.model.name)
        self.merge.open(spec, len(self.contexts))
        self._max_prefill_tokens = spec.max_prefill_tokens
        device = self.model.device
        self._nodes = ScratchNodes(spec, device, has_root=False)
        num_columns = sum(catch_up_widths(most_pending)[-1])
        self._pending = torch.zeros(num_slots, num_columns, dtype=torch.long, device=device)
        self._pending_first = self._pending[:, :CATCH_UP]
        self._num_pending = torch.ones(num_slots, dtype=torch.long, device=device)
        self._most_pending = [0] * num_slots
        self._skipped: set[int] = set()
        self._causal = torch.ones(widest, widest, dtype=torch.bool, device=device).tril()
        self._numbers = torch.arange(widest, device=device)
        # Entry n: upper bounds of a row's accepted drafts that were run, if n were run, and of all its accepted drafts.
        runs = torch.arange(self._nodes.capacity + 1)
        most = torch.stack([runs, torch.full_like(runs, torch.iinfo(torch.long).max)], dim=1)
        self._limits = most.to(device).unbind()
        # Cached views by rows and width, because each operation between two forwards takes time.
        self._pending_inputs: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def allocate(self) -> None:
        self.lanes.allocate()

    def encoded_ahead(self, prompts: Sequence[Prompt]) -> AbstractContextManager[None]:
        needed = any(context.encodes_whole(self.model) for context in self.contexts)
        return self.model.encoded_ahead(prompts if needed else ())

    def prefixes(self, request: Request, prefill_output: PrefillOutput) -> list[Prefix]:
        return [context.build(request, prefill_output, self.model) for context in self.contexts]

    def admit(self, slots: SlotBatch, first: Tensor, prefill_outputs: Sequence[PrefillOutput]) -> None:
        self._pending[slots.index, 0] = first
        self._num_pending[slots.index] = 1
        for slot in slots.ids:
            self._most_pending[slot] = 1
        self._skipped -= set(slots.ids)
        self.merge.reset(slots)

    def prefill(self, slots: SlotBatch, prefixes: Sequence[list[Prefix]]) -> None:
        filled = self.lanes.admit(slots, prefixes, keep_hidden=False, max_tokens=self._max_prefill_tokens)
        self.num_forwards += filled.num_forwards

    def skip(self, slots: SlotBatch) -> None:
        self.lanes.empty(slots)
        self._skipped |= set(slots.ids)

    def replay_key(self, slots: SlotBatch, num_levels: int) -> Hashable | None:
        """See `Drafter.replay_key`; steps that catch up on missed tokens have none."""
        most = max([self._most_pending[slot] for slot in slots.ids] or [CATCH_UP])
        # A step that runs again counts its token twice.
        limit = CATCH_UP if num_levels else self._pending.shape[1] - 2
        if most > limit or self._skipped.intersection(slots.ids):
            return None
        return self.lanes.replay_key(slots) if num_levels else ()

    def replayed(self, slots: SlotBatch, num_levels: int) -> None:
        if num_levels:
            self._note_drafted(slots)
        else:
            self._note_missed(slots)

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        hidden = self._catch_up(slots) if frontier.depth == 0 else self._extend(slots, frontier)
        logits = to_vocabulary(self.lanes.logits(hidden), self.vocab_size)
        return self.merge.merge(slots, logits, frontier.depth)

    def _catch_up(self, slots: SlotBatch) -> Tensor:
        """Run the pending tokens and commit them; return the hidden states (b, R, 1, D) of the root."""
        widths = catch_up_widths(max([self._most_pending[slot] for slot in slots.ids] or [CATCH_UP]))
        count = slots.of(self._num_pending)
        b = count.shape[0]
        self._nodes.clear()
        after_root: Tensor | None = None
        for start, width in widths:
            here = (count - start if start else count).clamp(0, width)
            depth, sees, nowhere = self._beginning(b, width)
            tokens = self._in_vocabulary(slots.of(self._pending[:, start : start + width]))
            # A row with fewer tokens leaves invalid entries at later KV positions, which the next write replaces.
            hidden = self.lanes.forward(slots, tokens, depth, sees)
            self.num_forwards += 1
            self.lanes.commit(slots, nowhere, here)
            last = here - 1 if start == 0 else (here - 1).clamp_min(0)
            ends = hidden.gather(2, last[:, None, None, None].expand(-1, hidden.shape[1], 1, hidden.shape[3]))
            if after_root is not None:
                ends = torch.where((here > 0)[:, None, None, None], ends, after_root)
            after_root = ends
        assert after_root is not None
        return after_root

    def _extend(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        """Run the frontier in scratch positions; return hidden states (b, R, F, D)."""
        depth, sees, start = self._nodes.place(frontier)
        self.num_forwards += 1
        return self.lanes.forward(slots, self._in_vocabulary(frontier.tokens), depth, sees, start)

    def _beginning(self, b: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return depths (b, P) of P pending tokens, their causal mask (b, P, P), and an empty path (b, 0)."""
        if (b, width) not in self._pending_inputs:
            depth = self._numbers[:width].expand(b, -1)
            self._pending_inputs[b, width] = depth, self._causal[:width, :width].expand(b, -1, -1), depth[:, :0]
        return self._pending_inputs[b, width]

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> None:
        slots, tree = verification.slots, verification.tree
        if tree.num_levels == 0:
            # Without drafts, the target's token is appended to the pending tokens.
            tokens = result.next
            if self._skipped.intersection(slots.ids):
                # Skipped slots never draft.
                slots, tokens = self._without_skipped(slots, tokens)
            count = self._num_pending[slots.index]
            self._pending[slots.index, count] = tokens
            slots.add(self._num_pending, torch.ones_like(count))
            self._note_missed(slots)
            return
        num_taken = result.n - 1
        if tree.is_chain and not self.merge.learns:
            # A chain's nodes, except the last, were run in order, so they are already at their KV positions.
            ends = torch.minimum(num_taken[:, None], self._limits[self._nodes.num_nodes])
            has = ends[:, 0]
            self.lanes.commit(slots, result.path[:, :0], has)
        else:
            columns = self._nodes.columns_of(tree.origin.gather(1, result.path[:, 1:]))
            if self.merge.learns:
                # The root was merged first, then the nodes in the order of their scratch positions.
                index = torch.where(columns >= 0, columns + 1, -1)
                self.merge.learn(verification, result, torch.cat([torch.zeros_like(index[:, :1]), index], dim=1))
            taken = torch.arange(columns.shape[1], device=columns.device) < num_taken[:, None]
            has = (taken & (columns >= 0)).sum(dim=1)
            self.lanes.commit(slots, columns.clamp_min(0), has)
            ends = torch.stack([has, num_taken], dim=1)
        # The last accepted draft was not run if it was a leaf. Entries after the pending tokens are not read.
        slots.put(self._pending_first, result.produced(tree).gather(1, ends))
        slots.put(self._num_pending, result.n - has)
        self._note_drafted(slots)

    def _note_missed(self, slots: SlotBatch) -> None:
        for slot in slots.ids:
            self._most_pending[slot] += 1

    def _note_drafted(self, slots: SlotBatch) -> None:
        for slot in slots.ids:
            self._most_pending[slot] = CATCH_UP

    def _without_skipped(self, slots: SlotBatch, values: Tensor) -> tuple[SlotBatch, Tensor]:
        """Return the slots that were not skipped, and their part of `values` (b, …)."""
        indices = [index for index, slot in enumerate(slots.ids) if slot not in self._skipped]
        rest = slots.some([slots.ids[index] for index in indices])
        return rest, values[torch.tensor(indices, dtype=torch.long, device=values.device)]

    def extras(self, slot: int) -> dict[str, Any]:
        return self.merge.extras(slot)

    def _in_vocabulary(self, tokens: Tensor) -> Tensor:
        """Replace tokens outside the drafter's vocabulary by token 0."""
        if self.model.vocab_size >= self.vocab_size:
            return tokens
        return torch.where(tokens < self.model.vocab_size, tokens, 0)


def catch_up_widths(most_tokens: int) -> list[tuple[int, int]]:
    """Return (start, width) of each forward that runs up to `most_tokens` tokens per row; one forward up to `WIDEST`.

    Widths are powers of two, so that few different shapes occur.
    """
    parts = [(start, WIDEST) for start in range(0, most_tokens - WIDEST, WIDEST)]
    start = len(parts) * WIDEST
    width = max(NARROWEST, 1 << (most_tokens - start - 1).bit_length()) if most_tokens > start else NARROWEST
    return [*parts, (start, width)]
