"""An independent smaller model as the drafter, with one cache lane per context.

Its memory lags the target's by the tokens it has not run yet: the pending token always, and the last accepted draft
when that was a leaf. Both are run by the first forward of the next draft. Knows no tree shapes and no acceptance rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.contracts import Context, EngineSpec, Judgement, Probe
from decoding.drafters.merge import Merge, SingleLane
from decoding.tree import Frontier, Verdict
from decoding.types import Request
from models.contract import TargetModel
from models.lanes import SlotBatch
from models.prefix import Prefix

CATCH_UP = 2
"""Tokens of the catch-up forward: a leaf that was accepted, and the pending token."""


class ModelDrafter:
    """Drafts with `model`; `vocab_size` is the target's, of which the drafter's first tokens must be the same.

    Per slot: `_pending` (S, 2) tokens not run yet and `_num_pending` (S,). Per step: the scratch column (b, G) of every
    grown node, and which scratch columns it sees (b, G, M).
    """

    name = "model"
    needs_hidden = False

    def __init__(
        self, model: TargetModel, contexts: Sequence[Context], vocab_size: int, merge: Merge | None = None
    ) -> None:
        self.merge = merge or SingleLane()
        self.model = model
        self.contexts = tuple(contexts)
        self.vocab_size = vocab_size
        self.num_forwards = 0
        self.needs_attention = any(context.needs_attention for context in contexts)

    def open(self, spec: EngineSpec) -> None:
        num_slots = spec.num_slots
        capacity = spec.max_context_tokens + max(spec.max_frontier_nodes, CATCH_UP) + CATCH_UP
        self.lanes = self.model.lanes(num_slots, len(self.contexts), capacity)
        self.merge.open(spec, len(self.contexts))
        self._max_scratch = spec.max_frontier_nodes
        self._max_grown = spec.max_grown_nodes
        device = self.model.device
        self._pending = torch.zeros(num_slots, CATCH_UP, dtype=torch.long, device=device)
        self._num_pending = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._causal = torch.ones(CATCH_UP, CATCH_UP, dtype=torch.bool, device=device).tril()

    def prefixes(self, request: Request, probe: Probe) -> list[Prefix]:
        return [context.build(request, probe, self.model) for context in self.contexts]

    def admit(self, slots: SlotBatch, prefixes: Sequence[list[Prefix]], first: Tensor, probes: Sequence[Probe]) -> None:
        self.lanes.admit(slots, prefixes)
        self.num_forwards += 1
        self._pending[slots.index, 0] = first
        self._num_pending[slots.index] = 1
        self.merge.reset(slots)

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        hidden = self._catch_up(slots) if frontier.depth == 0 else self._extend(slots, frontier)
        self.num_forwards += 1
        logits = _to_vocabulary(self.lanes.logits(hidden), self.vocab_size)
        return self.merge.merge(slots, logits, frontier.depth)

    def _catch_up(self, slots: SlotBatch) -> Tensor:
        """Run the pending tokens and commit them; hidden states (b, R, 1, D) after the root."""
        tokens, count = self._pending[slots.index], self._num_pending[slots.index]
        b = tokens.shape[0]
        depth = torch.arange(CATCH_UP, device=tokens.device).expand(b, -1)
        # A row with one pending token leaves junk one column further on, which the next write replaces.
        hidden = self.lanes.forward(slots, self._known(tokens), depth, self._causal.expand(b, -1, -1))
        self.lanes.commit(slots, depth[:, :0], count)
        self._num_scratch = 0
        self._column = tokens.new_full((b, self._max_grown), -1)
        self._sees = torch.zeros(b, self._max_grown, self._max_scratch, dtype=torch.bool, device=tokens.device)
        last = (count - 1)[:, None, None, None].expand(-1, hidden.shape[1], 1, hidden.shape[3])
        return hidden.gather(2, last)

    def _extend(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        """Run the frontier in scratch columns; hidden states (b, R, F, D)."""
        b, width = frontier.nodes.shape
        start = self._num_scratch
        columns = torch.arange(start, start + width, device=frontier.nodes.device)
        parents = frontier.parents[:, :, None].expand(-1, -1, self._max_scratch)
        sees = self._sees.gather(1, parents)
        sees[:, torch.arange(width, device=columns.device), columns] = True
        self._sees.scatter_(1, frontier.nodes[:, :, None].expand(-1, -1, self._max_scratch), sees)
        self._column.scatter_(1, frontier.nodes, columns.expand(b, -1))
        # The root is committed already, so a node of depth 1 stands at the row's next position.
        depth = torch.full_like(frontier.tokens, frontier.depth - 1)
        self._num_scratch += width
        return self.lanes.forward(slots, self._known(frontier.tokens), depth, sees[:, :, : self._num_scratch], start)

    def commit(self, judgement: Judgement, verdict: Verdict) -> None:
        slots, tree = judgement.slots, judgement.tree
        if tree.num_levels == 0:
            # Nothing was drafted, which the engine only does when every row ends with this very step.
            return
        grown = tree.origin.gather(1, verdict.path[:, 1:])
        columns = self._column.gather(1, grown)
        # Merged first was the root, then the nodes in the order of their scratch columns.
        merged = torch.cat([torch.zeros_like(columns[:, :1]), torch.where(columns >= 0, columns + 1, -1)], dim=1)
        self.merge.learn(judgement, verdict, merged)
        place = torch.arange(columns.shape[1], device=columns.device)[None]
        taken = place < (verdict.n - 1)[:, None]
        has = (taken & (columns >= 0)).sum(dim=1)
        self.lanes.commit(slots, columns.clamp_min(0), has)
        missing = (verdict.n - 1) > has
        last = tree.tokens.gather(1, verdict.path.gather(1, (verdict.n - 1)[:, None]))[:, 0]
        self._pending[slots.index, 0] = torch.where(missing, last, verdict.next)
        self._pending[slots.index, 1] = torch.where(missing, verdict.next, torch.zeros_like(verdict.next))
        self._num_pending[slots.index] = 1 + missing.long()

    def extras(self, slot: int) -> dict[str, Any]:
        return self.merge.extras(slot)

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens the drafter has never seen become its token 0: it has to read something there."""
        return torch.where(tokens < self.model.vocab_size, tokens, 0)


def _to_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or fill (…, V') logits to the target's V; tokens that the drafter does not have get probability 0."""
    own = logits.shape[-1]
    if own >= vocab_size:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - own), value=-torch.inf)
