"""Draft trees: fixed shapes, and trees that adapt to the drafter's confidence."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.section import Section

FIRST_NODES = 25
"""Nodes of SAGE's first tree by default."""
NAMED_TREE_LEVELS = 5
"""Depth of every named tree."""
Paths = tuple[tuple[Annotated[int, Field(ge=0, le=63)], ...], ...]


def check_paths(where: str, paths: Paths) -> None:
    """Raise ValueError if a path of child ranks lacks its parent or its elder sibling; `where` begins the message."""
    known = set(paths)
    if () in known:
        raise ValueError(f"{where}a path must not be empty: the root is always there")
    for path in paths:
        for needed in (path[:-1], (*path[:-1], path[-1] - 1) if path[-1] else ()):
            if needed and needed not in known:
                raise ValueError(f"{where}path {list(path)} needs {list(needed)}, which is not among the paths")


class ChainTree(Section):
    """One path of `length` drafts."""

    kind: Literal["chain"] = "chain"
    length: Annotated[int, Field(ge=1, le=64)] = 5
    """Drafts per step."""


class StaticTree(Section):
    """A fixed tree, by exactly one of three fields."""

    kind: Literal["static"] = "static"
    name: Literal["mc_sim_7b_63", "naive_extend_57"] | None = None
    """A tree of the papers: `mc_sim_7b_63` (25 drafts) or `naive_extend_57`."""
    branching: tuple[Annotated[int, Field(ge=1, le=64)], ...] = ()
    """Children of every node of depth 0, 1, …."""
    paths: Paths = ()
    """Paths of child ranks."""

    @model_validator(mode="after")
    def _one_of(self) -> StaticTree:
        if sum(map(bool, (self.branching, self.paths, self.name))) != 1:
            raise ValueError("give one of branching, paths and name, and not more")
        num_nodes, level = 0, 1
        for width in self.branching:
            level *= width
            num_nodes += level
        if num_nodes > 512:
            raise ValueError(f"branching {list(self.branching)} has {num_nodes} nodes, and at most 512 are verified")
        check_paths("", self.paths)
        if len(set(self.paths)) != len(self.paths):
            raise ValueError("the same path is given twice")
        return self


class DynamicTree(Section):
    """EAGLE-2's tree: a beam grows it, and the best nodes are verified."""

    kind: Literal["dynamic"] = "dynamic"
    top_k: Annotated[int, Field(ge=1, le=64)] = 10
    """Children of every node, and nodes of the beam."""
    depth: Annotated[int, Field(ge=0, le=32)] = 5
    """Levels of the beam below the root's children."""
    total_tokens: Annotated[int, Field(ge=2, le=513)] = 60
    """Nodes that are verified, root included."""

    @model_validator(mode="after")
    def _sizes(self) -> DynamicTree:
        num_grown = self.top_k + self.depth * self.top_k**2
        if self.total_tokens > num_grown + 1:
            raise ValueError(
                f"total_tokens {self.total_tokens} is more than the {num_grown + 1} nodes that top_k {self.top_k} and "
                f"depth {self.depth} can grow"
            )
        return self


class SageTree(Section):
    """SAGE: deep narrow trees for sure drafters, shallow wide trees for unsure ones, in each step."""

    kind: Literal["sage"] = "sage"
    growth: Literal["planned", "online"] = "planned"
    """`planned` from the step before, or `online` from the step's own distributions."""
    min_depth: Annotated[int, Field(ge=1, le=16)] = 3
    """Depth of an unsure drafter's tree."""
    max_depth: Annotated[int, Field(ge=1, le=16)] = 8
    """Depth of a sure drafter's tree."""
    depth_cap: Annotated[int, Field(ge=1, le=16)] = 8
    """How far long acceptances may raise max_depth."""
    min_width: Annotated[int, Field(ge=1, le=64)] = 2
    """Width of a sure drafter's tree."""
    max_width: Annotated[int, Field(ge=1, le=64)] = 10
    """Width of an unsure drafter's tree."""
    top_k: Annotated[int, Field(ge=2, le=64)] = 10
    """Candidates whose entropy is the confidence, and most children of a node."""
    max_nodes: Annotated[int, Field(ge=2, le=512)] = 64
    """Most drafts of a tree."""
    max_expanded: Annotated[int, Field(ge=1, le=64)] = 6
    """Most nodes of a level that have children."""
    threshold_scale: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """A child on level l needs a probability above this · l / D."""
    threshold: Literal["cumulative", "node"] = "cumulative"
    """Of the whole path (`cumulative`) or the `node` alone."""
    threshold_gates: Literal["inclusion", "expansion"] = "inclusion"
    """What the threshold decides: which nodes are in the tree (`inclusion`), or which get children (`expansion`)."""
    parent_probability: Literal["conditional", "cumulative"] = "conditional"
    """The parent's probability that widens a level: `conditional` or `cumulative`."""
    width_rounding: Literal["nearest", "floor"] = "nearest"
    """Rounding of widths: `nearest` or `floor`."""
    min_children: Annotated[int, Field(ge=0, le=1)] = 1
    """Children that the decay always leaves, 0 or 1."""
    decay_first_level: bool = False
    """Whether the root's children are scaled as well."""
    depth_rounding: Literal["nearest", "floor", "ceil"] = "nearest"
    """Rounding of depths: `nearest`, `floor` or `ceil`."""
    count_root: bool = False
    """Whether max_nodes counts the root."""
    order: Literal["best_first", "depth_first"] = "best_first"
    """Order in which nodes fill the budget: `best_first` or `depth_first`."""
    source: Literal["root", "accepted_leaf", "mean"] = "root"
    """Whose distribution plans the next tree: `root`, `accepted_leaf` or `mean`."""
    initial_confidence: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Confidence before the first step."""
    history_window: Annotated[int, Field(ge=0, le=1000)] = 10
    """Steps whose mean acceptance moves max_depth; 0 is off."""
    history_low: Annotated[float, Field(ge=0.0)] = 2.0
    """A mean below it lowers max_depth."""
    history_high: Annotated[float, Field(ge=0.0)] = 3.0
    """A mean above it raises max_depth."""
    first_paths: Paths = ()
    """Every sample's first tree; empty is SpecVLM's 25 nodes."""

    @model_validator(mode="after")
    def _bounds(self) -> SageTree:
        if not self.min_depth <= self.max_depth <= self.depth_cap:
            raise ValueError(
                f"min_depth {self.min_depth}, max_depth {self.max_depth} and depth_cap {self.depth_cap} must be in "
                "ascending order"
            )
        if not self.min_width <= self.max_width <= self.top_k:
            raise ValueError(
                f"min_width {self.min_width}, max_width {self.max_width} and top_k {self.top_k} must be in ascending "
                "order: only top_k candidates are considered"
            )
        if self.history_low > self.history_high:
            raise ValueError(f"history_low {self.history_low} is above history_high {self.history_high}")
        if self.order == "depth_first" and (self.top_k + 1) ** self.depth_cap > 2**53:
            raise ValueError(
                f"order depth_first numbers the paths, and top_k {self.top_k} with depth_cap {self.depth_cap} has too "
                "many of them; use best_first or smaller numbers"
            )
        if self.growth == "online" and self.source != "root":
            raise ValueError("source: an online tree begins before any distribution but the root's is known; use root")
        check_paths("first_paths: ", self.first_paths)
        num_first = len(set(self.first_paths)) or FIRST_NODES
        if num_first > self.max_nodes - int(self.count_root) and self.growth == "planned":
            raise ValueError(
                f"max_nodes {self.max_nodes} does not hold the {num_first} nodes of the first tree; give smaller "
                "first_paths as well"
            )
        return self


Tree = Annotated[ChainTree | StaticTree | DynamicTree | SageTree, Field(discriminator="kind")]


def max_depth(tree: Tree) -> int | None:
    """The deepest draft of a tree of fixed shape; None for the others."""
    if isinstance(tree, ChainTree):
        return tree.length
    if isinstance(tree, StaticTree):
        if tree.name is not None:
            return NAMED_TREE_LEVELS
        return len(tree.branching) or max(len(path) for path in tree.paths)
    if isinstance(tree, DynamicTree):
        return tree.depth + 1
    return None
