"""Defines the options of draft trees: fixed shapes, and trees that adapt to the drafter's confidence."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from configs.section import BUILT_IN, EXTERNAL, ExternalTreeConfig, Section, kind_tag

FIRST_NODES = 25
"""Default number of nodes of SAGE's first tree."""
NAMED_TREE_LEVELS = 5
"""Depth of every named tree."""
Paths = tuple[tuple[Annotated[int, Field(ge=0, le=63)], ...], ...]


def check_paths(where: str, paths: Paths) -> None:
    """Raise ValueError if the parent or the previous sibling of a path is missing; `where` begins the message."""
    known = set(paths)
    if () in known:
        raise ValueError(f"{where}a path must not be empty: the root is always there")
    for path in paths:
        for needed in (path[:-1], (*path[:-1], path[-1] - 1) if path[-1] else ()):
            if needed and needed not in known:
                raise ValueError(f"{where}path {list(path)} needs {list(needed)}, which is not among the paths")


class ChainTreeConfig(Section):
    """A chain of `length` drafts."""

    kind: Literal["chain"] = "chain"
    length: Annotated[int, Field(ge=1, le=64)] = 5
    """Number of drafts per step."""


class StaticTreeConfig(Section):
    """A fixed tree; set exactly one of `name`, `branching` and `paths`."""

    kind: Literal["static"] = "static"
    name: Literal["mc_sim_7b_63", "naive_extend_57"] | None = None
    """A published tree: `mc_sim_7b_63` (25 drafts) or `naive_extend_57`."""
    branching: tuple[Annotated[int, Field(ge=1, le=64)], ...] = ()
    """Number of children of every node at depth 0, 1, …."""
    paths: Paths = ()
    """Nodes as paths of child ranks from the root."""

    @model_validator(mode="after")
    def _one_of(self) -> StaticTreeConfig:
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


class DynamicTreeConfig(Section):
    """EAGLE-2's dynamic tree: a beam expands the tree, and the most likely nodes are verified."""

    kind: Literal["dynamic"] = "dynamic"
    top_k: Annotated[int, Field(ge=1, le=64)] = 10
    """Number of children of every expanded node, and number of nodes of the beam."""
    depth: Annotated[int, Field(ge=0, le=32)] = 5
    """Number of levels that the beam adds below the root's children."""
    total_tokens: Annotated[int, Field(ge=2, le=513)] = 60
    """Number of verified nodes, root included."""

    @model_validator(mode="after")
    def _sizes(self) -> DynamicTreeConfig:
        num_grown = self.top_k + self.depth * self.top_k**2
        if self.total_tokens > num_grown + 1:
            raise ValueError(
                f"total_tokens {self.total_tokens} is more than the {num_grown + 1} nodes that top_k {self.top_k} and "
                f"depth {self.depth} can grow"
            )
        return self


class SageTreeConfig(Section):
    """SAGE: deep and narrow trees if the drafter's confidence is high, shallow and wide trees if it is low."""

    kind: Literal["sage"] = "sage"
    growth: Literal["planned", "online"] = "planned"
    """Confidence that shapes a tree: of the previous step (`planned`), or of the current step (`online`)."""
    min_depth: Annotated[int, Field(ge=1, le=16)] = 3
    """Depth of the tree at the lowest confidence."""
    max_depth: Annotated[int, Field(ge=1, le=16)] = 8
    """Depth of the tree at the highest confidence."""
    depth_cap: Annotated[int, Field(ge=1, le=16)] = 8
    """Upper bound to which long accepted paths may raise `max_depth`."""
    min_width: Annotated[int, Field(ge=1, le=64)] = 2
    """Width of the tree at the highest confidence."""
    max_width: Annotated[int, Field(ge=1, le=64)] = 10
    """Width of the tree at the lowest confidence."""
    top_k: Annotated[int, Field(ge=2, le=64)] = 10
    """Number of candidates whose entropy determines the confidence, and most children of a node."""
    max_nodes: Annotated[int, Field(ge=2, le=512)] = 64
    """Maximum number of drafts of a tree."""
    max_expanded: Annotated[int, Field(ge=1, le=64)] = 6
    """Maximum number of nodes of a level that have children."""
    threshold_scale: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """A child on level l of a tree of depth D needs a probability above `threshold_scale` · l / D."""
    threshold: Literal["cumulative", "node"] = "cumulative"
    """Probability that is compared with the threshold: of the whole path (`cumulative`) or of the `node` alone."""
    threshold_gates: Literal["inclusion", "expansion"] = "inclusion"
    """Effect of the threshold: it limits the nodes of the tree (`inclusion`), or the nodes with children (`expansion`).
    """
    source: Literal["root", "accepted_leaf", "mean"] = "root"
    """Node whose distribution determines the next tree: `root`, `accepted_leaf`, or the `mean` over nodes."""
    initial_confidence: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Confidence before the first step."""
    history_window: Annotated[int, Field(ge=0, le=1000)] = 10
    """Number of steps whose mean acceptance adjusts `max_depth`; 0 is off."""
    history_low: Annotated[float, Field(ge=0.0)] = 2.0
    """A mean below this value lowers `max_depth`."""
    history_high: Annotated[float, Field(ge=0.0)] = 3.0
    """A mean above this value raises `max_depth`."""
    first_paths: Paths = ()
    """Nodes of each sample's first tree, as paths of child ranks; by default SpecVLM's 25 nodes."""

    @model_validator(mode="after")
    def _bounds(self) -> SageTreeConfig:
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
        if self.growth == "online" and self.source != "root":
            raise ValueError("source: an online tree begins before any distribution but the root's is known; use root")
        check_paths("first_paths: ", self.first_paths)
        num_first = len(set(self.first_paths)) or FIRST_NODES
        if num_first > self.max_nodes and self.growth == "planned":
            raise ValueError(
                f"max_nodes {self.max_nodes} does not hold the {num_first} nodes of the first tree; give smaller "
                "first_paths as well"
            )
        return self


BuiltInTreeConfig = Annotated[
    ChainTreeConfig | StaticTreeConfig | DynamicTreeConfig | SageTreeConfig, Field(discriminator="kind")
]
TreeConfig = Annotated[
    Annotated[BuiltInTreeConfig, Tag(BUILT_IN)] | Annotated[ExternalTreeConfig, Tag(EXTERNAL)], Discriminator(kind_tag)
]


def max_depth(tree: TreeConfig) -> int | None:
    """Return the depth of the deepest draft of a tree; None for SAGE trees and external ones."""
    if isinstance(tree, ChainTreeConfig):
        return tree.length
    if isinstance(tree, StaticTreeConfig):
        if tree.name is not None:
            return NAMED_TREE_LEVELS
        return len(tree.branching) or max(len(path) for path in tree.paths)
    if isinstance(tree, DynamicTreeConfig):
        return tree.depth + 1
    return None
