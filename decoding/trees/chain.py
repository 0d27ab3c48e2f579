"""Builds chains: trees in which every node has at most one child."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decoding.contracts import DraftLogits, EngineSpec, TreePolicy
from decoding.sampling import perturb
from decoding.tree import DraftTree, Frontier
from models.backends.base import REFERENCE, Backend
from models.backends.select import backend_for
from models.kv.lanes import SlotBatch


class _Line(NamedTuple):
    """Index tensors for chains of one shape: node `numbers` and `parents` (b, N), the mask `ancestry` (b, N, N), the
    tuples `nodes` and `above` with numbers and parents (b, 1) by node, and zeros `beginning` (b, 1)."""

    numbers: Tensor
    parents: Tensor
    ancestry: Tensor
    nodes: tuple[Tensor, ...]
    above: tuple[Tensor, ...]
    beginning: Tensor


class Chain(TreePolicy):
    """Policy for a single path of `length` drafts: the drafter's argmax, or its sample on sampled rows."""

    checks_numbers = True
    max_siblings = 1

    def __init__(self, length: int) -> None:
        assert length >= 1, length
        self.max_levels = length
        self.max_nodes = self.max_grown_nodes = length + 1
        # The root is committed before its children are drafted, so it needs no scratch position.
        self.max_frontier_nodes = length - 1
        self._backend: Backend = REFERENCE
        self._lines: dict[tuple[int, int, torch.device], _Line] = {}

    def open(self, spec: EngineSpec) -> None:
        self._backend = backend_for(spec.device)

    def start(self, slots: SlotBatch, root: Tensor, num_levels: int, keep_probs: bool) -> Frontier:
        self._num_levels = min(num_levels, self.max_levels)
        self._line = self._line_of(root.shape[0], self._num_levels + 1, root.device)
        self._max_depth: Tensor | None = None
        self._tokens = [root[:, None]]
        # Score of each node as the best child of its parent; the root has a finite placeholder.
        self._best = [self._line.beginning]
        self._probs: list[Tensor] = []
        self._keep_probs = keep_probs
        return self._frontier()

    def grow(self, draft_logits: DraftLogits) -> Frontier | None:
        if self._keep_probs:
            self._probs.append(draft_logits.probs()[:, 0])
        scores = perturb(draft_logits.given, draft_logits.noise, draft_logits.rows)
        best, tokens = scores.max(dim=-1)
        self._max_depth = draft_logits.max_depth
        self._best.append(best)
        self._tokens.append(tokens)
        return self._frontier() if len(self._tokens) <= self._num_levels else None

    def finish(self) -> DraftTree:
        best = torch.cat(self._best, dim=1)
        # The best score is −inf if no token remains, and NaN or +inf if any logit is NaN or +inf.
        max_depth = torch.full_like(best[:, 0], 1 << 30).long() if self._max_depth is None else self._max_depth
        valid, num_drafted, failed = self._backend.cut_chain(best, max_depth)
        probs = None
        if self._keep_probs:
            probs = torch.stack([*self._probs, torch.zeros_like(self._probs[0])], dim=1)
        return DraftTree(
            tokens=torch.cat(self._tokens, dim=1),
            parents=self._line.parents,
            depth=self._line.numbers,
            valid=valid,
            origin=self._line.numbers,
            num_levels=self._num_levels,
            max_siblings=self.max_siblings,
            draft_probs=probs,
            is_chain=True,
            failed=failed,
            num_drafted=None if self._max_depth is None else num_drafted,
            # A chain's invalid nodes are at its end, so no valid node can see them.
            ancestry=self._line.ancestry,
        )

    def _frontier(self) -> Frontier:
        depth, line = len(self._tokens) - 1, tuple(self._tokens[1:])
        return Frontier(depth, self._line.nodes[depth], self._line.above[depth], self._tokens[-1], line)

    def _line_of(self, b: int, num_nodes: int, device: torch.device) -> _Line:
        if (b, num_nodes, device) not in self._lines:
            numbers = torch.arange(num_nodes, device=device).expand(b, -1)
            parents = numbers - 1
            ancestry = torch.ones(num_nodes, num_nodes, dtype=torch.bool, device=device).tril().expand(b, -1, -1)
            nodes, above = torch.split(numbers, 1, dim=1), torch.split(parents, 1, dim=1)
            beginning = torch.zeros(b, 1, device=device)
            self._lines[b, num_nodes, device] = _Line(numbers, parents, ancestry, nodes, above, beginning)
        return self._lines[b, num_nodes, device]
