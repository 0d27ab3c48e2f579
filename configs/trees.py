"""Trees that adapt to the drafter's confidence."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.section import Section

FIRST_NODES = 25
"""Nodes of the first tree by default."""


class SageTree(Section):
    """SAGE: sure drafters get deep narrow trees, unsure ones shallow wide trees, anew at every step."""

    kind: Literal["sage"] = "sage"
    """SAGE: depth and width from the drafter's confidence."""
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
    """`nearest` or `floor`."""
    min_children: Annotated[int, Field(ge=0, le=1)] = 1
    """Children that the decay always leaves, 0 or 1."""
    decay_first_level: bool = False
    """Whether the root's children are scaled as well."""
    depth_rounding: Literal["nearest", "floor", "ceil"] = "nearest"
    """`nearest`, `floor` or `ceil`."""
    count_root: bool = False
    """Whether max_nodes counts the root."""
    order: Literal["best_first", "depth_first"] = "best_first"
    """Who fills the budget: `best_first` or `depth_first`."""
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
    first_paths: tuple[tuple[Annotated[int, Field(ge=0, le=63)], ...], ...] = ()
    """Every sample's first tree; empty is SpecVLM's 25 nodes."""

    @model_validator(mode="after")
    def _bounds(self) -> SageTree:
        if not self.min_depth <= self.max_depth <= self.depth_cap:
            raise ValueError(
                f"min_depth {self.min_depth}, max_depth {self.max_depth} and depth_cap {self.depth_cap} must stand in "
                "ascending order"
            )
        if not self.min_width <= self.max_width <= self.top_k:
            raise ValueError(
                f"min_width {self.min_width}, max_width {self.max_width} and top_k {self.top_k} must stand in "
                "ascending order: only top_k candidates are looked at"
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
        self._check_first_paths()
        return self

    def _check_first_paths(self) -> None:
        known = set(self.first_paths)
        if () in known:
            raise ValueError("first_paths: a path must not be empty, the root is always there")
        for path in self.first_paths:
            for needed in (path[:-1], (*path[:-1], path[-1] - 1) if path[-1] else ()):
                if needed and needed not in known:
                    raise ValueError(f"first_paths: {list(path)} needs {list(needed)}, which is not among the paths")
        num_first = len(known) or FIRST_NODES
        if num_first > self.max_nodes - int(self.count_root) and self.growth == "planned":
            raise ValueError(
                f"max_nodes {self.max_nodes} does not hold the {num_first} nodes of the first tree; give smaller "
                "first_paths as well"
            )
