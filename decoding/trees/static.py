"""Builds trees of a fixed shape: uniform branching, or a list of child-rank paths, such as the trees of papers.

A path (1, 0) is the best child of the root's second-best child. Ranks are by log q + noise, so with shared-noise
sampling the first child is the drafter's own sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from decoding.contracts import DraftLogits, TreePolicy
from decoding.sampling import perturb
from decoding.tree import DraftTree, Frontier
from models.kv.lanes import SlotBatch

Paths = tuple[tuple[int, ...], ...]

# Level by level: 4, 8, 8, 3 and 2 paths.
SPECVLM_PATHS: Paths = (
    *((rank,) for rank in range(4)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""SpecVLM's static tree of 25 nodes, the first tree of SAGE (appendix A.1)."""

# Level by level: 5, 13, 16, 14 and 9 paths.
_NAIVE_EXTEND_57: Paths = (
    *((rank,) for rank in range(5)),
    *((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (4, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 2, 0), (0, 2, 1), (0, 2, 2)),
    *((0, 3, 0), (0, 3, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 3), (0, 0, 1, 0), (0, 0, 1, 1), (0, 0, 1, 2)),
    *((0, 0, 2, 0), (0, 0, 2, 1), (0, 0, 3, 0), (0, 1, 0, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 2, 0, 0)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 0, 0, 0, 2), (0, 0, 0, 1, 0), (0, 0, 0, 1, 1)),
    *((0, 0, 1, 0, 0), (0, 0, 1, 0, 1), (0, 0, 1, 1, 0), (0, 0, 2, 0, 0)),
)

NAMED_PATHS: Mapping[str, Paths] = {
    # EAGLE's first tree, also in SpecVLM and LANTERN++.
    "mc_sim_7b_63": SPECVLM_PATHS,
    # The default of LANTERN++.
    "naive_extend_57": _NAIVE_EXTEND_57,
}


def nodes_of(paths: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int], list[int]]:
    """Return parents, ranks and depths of the nodes, breadth first from the root; `paths` must contain all parents."""
    nodes = [(), *sorted(set(paths), key=lambda path: (len(path), path))]
    index_of = {path: index for index, path in enumerate(nodes)}
    for path in nodes[1:]:
        assert path[:-1] in index_of, f"path {path} has no parent in the tree"
    parents = [index_of[path[:-1]] if path else -1 for path in nodes]
    return parents, [path[-1] if path else 0 for path in nodes], [len(path) for path in nodes]


def branching_paths(branching: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all paths of a tree whose nodes of depth d have `branching[d]` children."""
    levels = range(1, len(branching) + 1)
    return [path for depth in levels for path in product(*(range(width) for width in branching[:depth]))]


@dataclass(frozen=True)
class _LevelPlan:
    """Index tensors for growing one level of C children below a frontier of F nodes.

    `most` is the number of ranks needed per node; `frontier` (F,) are the frontier's node indices. `under` (frontier
    index) and `rank`, both (C,), select each child's token from the frontier's ranking; `above` (C,) is the parent's
    index among all nodes of its level. `inner` (F',) are the children that have children; `nodes` and `parents` (F',)
    are the node indices of these and of their parents.
    """

    most: int
    frontier: Tensor
    under: Tensor
    rank: Tensor
    above: Tensor
    inner: Tensor
    nodes: Tensor
    parents: Tensor


class StaticTree(TreePolicy):
    """Policy for a fixed set of paths of child ranks; the set must contain the parent of every path."""

    max_siblings: int

    def __init__(self, paths: Sequence[tuple[int, ...]]) -> None:
        # Breadth first, so that a tree of fewer levels is a prefix of the nodes.
        self._parents, self._ranks, self._depths = nodes_of(paths)
        inner = set(self._parents)
        self.max_levels = max(self._depths)
        self.max_nodes = self.max_grown_nodes = len(self._parents)
        # The root is committed before its children are drafted, so it needs no scratch position.
        self.max_frontier_nodes = sum(1 for i in inner if i > 0)
        self.max_siblings = max(self._parents.count(i) for i in inner)
        self.is_chain = self.max_nodes == self.max_levels + 1
        self._plans: dict[torch.device, list[_LevelPlan]] = {}
        self._shapes: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def _plan(self, device: torch.device) -> list[_LevelPlan]:
        if device not in self._plans:
            self._plans[device] = [self._plan_level(depth, device) for depth in range(self.max_levels)]
        return self._plans[device]

    def _shape(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return parents, depths and indices of all nodes; cached, because a copy from the host blocks."""
        if device not in self._shapes:
            arrays = (self._parents, self._depths, range(self.max_nodes))
            parents, depths, numbers = (_index(device, values) for values in arrays)
            self._shapes[device] = parents, depths, numbers
        return self._shapes[device]

    def _plan_level(self, depth: int, device: torch.device) -> _LevelPlan:
        upper, children = ([i for i, at in enumerate(self._depths) if at == level] for level in (depth, depth + 1))
        frontier = [i for i in upper if i in self._parents]
        inner = [index for index, i in enumerate(children) if i in self._parents]
        return _LevelPlan(
            most=max(self._ranks[i] for i in children) + 1,
            frontier=_index(device, frontier),
            under=_index(device, [frontier.index(self._parents[i]) for i in children]),
            rank=_index(device, [self._ranks[i] for i in children]),
            above=_index(device, [self._parents[i] - upper[0] for i in children]),
            inner=_index(device, inner),
            nodes=_index(device, [children[index] for index in inner]),
            parents=_index(device, [self._parents[children[index]] for index in inner]),
        )

    def start(self, slots: SlotBatch, root: Tensor, num_levels: int, keep_probs: bool) -> Frontier:
        self._num_levels = min(num_levels, self.max_levels)
        self._tokens = [root[:, None]]
        self._valid = [torch.ones_like(root, dtype=torch.bool)[:, None]]
        self._probs: list[Tensor] = []
        self._keep_probs = keep_probs
        self._frontier = Frontier.at_root(root)
        return self._frontier

    def grow(self, draft_logits: DraftLogits) -> Frontier | None:
        depth, logits = self._frontier.depth, draft_logits.logits
        plan = self._plan(logits.device)[depth]
        if self._keep_probs:
            self._probs.append(draft_logits.probs())
        scores = perturb(logits, draft_logits.noise, draft_logits.rows)
        best = scores.topk(plan.most, dim=-1)
        values, indices = best.values[:, plan.under, plan.rank], best.indices[:, plan.under, plan.rank]
        above = self._valid[-1][:, plan.above]
        # Filters may leave fewer candidates than the shape has children.
        self._valid.append((values > -torch.inf) & above)
        self._tokens.append(indices)
        if depth + 1 >= self._num_levels:
            return None
        b = indices.shape[0]
        tokens, above_path = indices[:, plan.inner], self._frontier.path[:, plan.under[plan.inner]]
        path = torch.cat([above_path, tokens[:, :, None]], dim=-1)
        self._frontier = Frontier(depth + 1, plan.nodes.expand(b, -1), plan.parents.expand(b, -1), tokens, path)
        return self._frontier

    def finish(self) -> DraftTree:
        tokens = torch.cat(self._tokens, dim=1)
        b, num_nodes = tokens.shape
        device = tokens.device
        parents, depths, numbers = self._shape(device)
        probs = None
        if self._keep_probs:
            probs = self._probs[0].new_zeros(b, num_nodes, self._probs[0].shape[-1])
            for plan, values in zip(self._plan(device), self._probs, strict=False):
                probs[:, plan.frontier] = values
        return DraftTree(
            tokens=tokens,
            parents=parents[:num_nodes].expand(b, -1),
            depth=depths[:num_nodes].expand(b, -1),
            valid=torch.cat(self._valid, dim=1),
            origin=numbers[:num_nodes].expand(b, -1),
            num_levels=len(self._tokens) - 1,
            max_siblings=self.max_siblings,
            draft_probs=probs,
            is_chain=self.is_chain,
        )


def _index(device: torch.device, values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)
