"""Plans SAGE's trees over child ranks before any token is known.

A path (0, 2) is the third-best child of the root's best child; its probability is P̃[0] · P̃[2] for one distribution P̃
over ranks.

The plan is a best-first search for all rows at once, with fixed shapes: level by level, the F most probable admissible
nodes (`max_expanded`) get all their k children; then the most probable nodes of all levels fill the node budget.

Example: k = 3, P̃ = (0.6, 0.3, 0.1), α = 0.18, D = 3.9 of 3 … 8, W(α) = 8.5, F = 2, a budget of 5 nodes. θ_l = 0.1 · l
/ 3.9 = 0.026, 0.051, 0.077, 0.103:

    level 1   (0) .60  (1) .30  (2) .10                           all above .026; (0) and (1) may have children
    level 2   (0,0) .36  (0,1) .18  (0,2) .06                     all above .051; W_2 = 8.5 / 2 · (0.5 + 0.6) = 4.7 → 5
              (1,0) .18  (1,1) .09  (1,2) .03 refused             W_2 = 8.5 / 2 · (0.5 + 0.3) = 3.4 → 3
    level 3   below (0,0): .216 .108 .036 refused, …

    kept: (0) .60  (0,0) .36  (1) .30  (0,0,0) .216  (0,1) .18    (0,1) before (1,0): equal, but earlier in the pool
    node order: root, (0), (1), (0,0), (0,1), (0,0,0); parents −1, 0, 0, 1, 1, 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.trees.confidence import (
    SageSettings,
    level_threshold,
    level_width,
    real_depth,
    real_width,
    whole_depth,
)
from decoding.trees.pool import best_of, keep_best, with_root
from decoding.trees.static import nodes_of


@dataclass(frozen=True)
class IndexTree:
    """Trees over ranks, one per row, padded to N nodes in level order; node 0 is the root.

    All fields are (b, N): `parents` (−1 for the root and for padding), `ranks` (a node's rank among its siblings in
    draw order), `depth`, `valid`, `expanded` (has children), `frontier_index` (number of earlier expanded nodes of its
    level).
    """

    parents: Tensor
    ranks: Tensor
    depth: Tensor
    valid: Tensor
    expanded: Tensor
    frontier_index: Tensor

    @staticmethod
    def of_nodes(parents: Tensor, ranks: Tensor, depth: Tensor, valid: Tensor) -> IndexTree:
        """Return the tree with `expanded` and `frontier_index` computed from the other fields."""
        b, num_nodes = parents.shape
        children = torch.zeros(b, num_nodes, dtype=torch.long, device=parents.device)
        has_parent = valid & (parents >= 0)
        expanded = children.scatter_add(1, parents.clamp_min(0), has_parent.long()) > 0
        same_level = depth[:, :, None] == depth[:, None, :]
        frontier_index = (same_level & expanded[:, None, :]).tril(-1).sum(-1)
        return IndexTree(parents, ranks, depth, valid, expanded, torch.where(expanded, frontier_index, 0))

    @staticmethod
    def of_paths(paths: Sequence[tuple[int, ...]], num_nodes: int, device: torch.device) -> IndexTree:
        """Return one row (1, N) with `paths` of ranks; `paths` must contain the parent of every path."""
        parents, ranks, depth = nodes_of(paths)
        spare = num_nodes - len(parents)
        assert spare >= 0, f"{len(parents) - 1} paths do not fit into {num_nodes - 1} nodes"
        padded = [parents + [-1] * spare, ranks + [0] * spare, depth + [0] * spare]
        rows = torch.tensor(padded, dtype=torch.long, device=device)[:, None]
        valid = torch.arange(num_nodes, device=device)[None] < len(parents)
        return IndexTree.of_nodes(rows[0], rows[1], rows[2], valid)

    def levels(self) -> Tensor:
        """Return the depth (b,) of each row's deepest node."""
        return torch.where(self.valid, self.depth, 0).amax(dim=1)


@dataclass(frozen=True)
class Beam:
    """The F nodes of a level that may have children; all fields are (b, F): `cumulative` and `conditional` probability,
    index `node` in the pool (−1 for the root), and mask `admissible`."""

    cumulative: Tensor
    conditional: Tensor
    node: Tensor
    admissible: Tensor

    @staticmethod
    def at_root(like: Tensor) -> Beam:
        """Return the beam that contains only the root, with the rows, dtype and device of `like` (b,)."""
        ones = torch.ones_like(like)[:, None]
        zeros = torch.zeros_like(ones, dtype=torch.long)
        return Beam(ones, ones, zeros - 1, zeros == 0)


@dataclass(frozen=True)
class Children:
    """All k children of a beam's F nodes: fields as in `Beam`, with shape (b, F, k), and the mask `expandable` of
    children that may have children themselves."""

    cumulative: Tensor
    conditional: Tensor
    admissible: Tensor
    expandable: Tensor


def admissible_children(
    beam: Beam, probs: Tensor, level: int, alpha: Tensor, depth: Tensor, settings: SageSettings
) -> Children:
    """Return the children of `beam` on `level`; `probs` (b, F or 1, k) are their conditional probabilities by rank.

    A child is admissible if its rank is below W_l, its probability above θ_l and the level within D. The root's best
    child is always admissible, so that every row has a draft. If `threshold_gates` is "expansion" (the paper's text), a
    child below θ_l is admissible but gets no children.
    """
    num_ranks = probs.shape[-1]
    rank = torch.arange(num_ranks, device=probs.device)
    conditional = probs.expand(-1, beam.node.shape[1], -1)
    # At most the parent's probability, even if rounding makes the conditional probability exceed 1.
    cumulative = beam.cumulative[:, :, None] * conditional.clamp_max(1.0)
    width = level_width(real_width(alpha, settings)[:, None], level, beam.conditional)
    tested = cumulative if settings.threshold == "cumulative" else conditional
    likely = tested > level_threshold(level, depth, settings)[:, None, None]
    keeps_rules = (rank < width[:, :, None]) & (level <= whole_depth(depth))[:, None, None]
    gates_expansion = settings.threshold_gates == "expansion"
    if not gates_expansion:
        keeps_rules = keeps_rules & likely
    if level == 1:
        keeps_rules = keeps_rules | (rank == 0)
    admissible = keeps_rules & beam.admissible[:, :, None]
    return Children(cumulative, conditional, admissible, admissible & likely if gates_expansion else admissible)


def priority(children: Children) -> Tensor:
    """Return sort keys (b, F · k), larger is better; −inf for nodes that are not admissible."""
    # Paths with the same ranks in different order are equally probable; rounding errors must not break the tie.
    value = (children.cumulative.double() * 2.0**40).round()
    return torch.where(children.admissible, value, -torch.inf).flatten(1)


def frontier_widths(num_levels: int, settings: SageSettings) -> list[int]:
    """Return the maximum number of nodes with children at each depth 0, …, `num_levels` − 1."""
    widths = [1]
    while len(widths) < num_levels:
        widths.append(min(settings.max_expanded, widths[-1] * settings.top_k))
    return widths


def plan_tree(probs: Tensor, alpha: Tensor, max_depth: Tensor, settings: SageSettings) -> IndexTree:
    """Plan the next tree of every row from `probs` (b, k) over ranks, confidence `alpha` (b,) and `max_depth` (b,).

    SAGE, section 3.2 and Algorithm 1, lines 15 to 18.
    """
    num_ranks = probs.shape[-1]
    depth = real_depth(alpha, max_depth, settings)
    probs = probs.double()
    beam = Beam.at_root(alpha.double())
    pool_priority: list[Tensor] = []
    pool_parent: list[Tensor] = []
    pool_depth: list[Tensor] = []
    start = 0
    widths = frontier_widths(settings.depth_cap, settings)
    for level, _ in enumerate(widths, start=1):
        children = admissible_children(beam, probs[:, None], level, alpha, depth, settings)
        first = priority(children)
        pool_priority.append(first)
        pool_parent.append(beam.node[:, :, None].expand(-1, -1, num_ranks).flatten(1))
        pool_depth.append(torch.full_like(pool_parent[-1], level))
        if level < len(widths):
            beam = next_beam(children, first, widths[level], start)
        start += first.shape[1]
    parent, level_of = torch.cat(pool_parent, dim=1), torch.cat(pool_depth, dim=1)
    rank = torch.arange(start, device=probs.device) % num_ranks
    pool_index, valid, parents = keep_best(torch.cat(pool_priority, dim=1), parent, settings.max_nodes)
    return IndexTree.of_nodes(
        with_root(parents, -1),
        with_root(torch.where(valid, rank[pool_index], 0), 0),
        with_root(torch.where(valid, level_of.gather(1, pool_index), 0), 0),
        with_root(valid, True),
    )


def next_beam(children: Children, first: Tensor, width: int, start: int) -> Beam:
    """Return the `width` expandable children with the highest priority `first` (b, F · k); `start` is the pool index of
    the first child."""
    values, index = best_of(torch.where(children.expandable.flatten(1), first, -torch.inf), width)
    return Beam(
        children.cumulative.flatten(1).gather(1, index),
        children.conditional.flatten(1).gather(1, index),
        index + start,
        values > -torch.inf,
    )
