"""Trees that adapt to the drafter's confidence."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.section import Section

FIRST_NODES = 25
"""Nodes of the first tree when none is given."""


class SageTree(Section):
    """SAGE: sure drafters get deep narrow trees, unsure ones shallow wide trees, anew at every step."""

    kind: Literal["sage"] = "sage"
    growth: Literal["planned", "online"] = "planned"
    """Each tree planned from the step before it (Algorithm 1), or grown from the step's own distributions."""
    min_depth: Annotated[int, Field(ge=1, le=16)] = 3
    max_depth: Annotated[int, Field(ge=1, le=16)] = 8
    depth_cap: Annotated[int, Field(ge=1, le=16)] = 8
    """How far a run of long acceptances may raise the deepest depth."""
    min_width: Annotated[int, Field(ge=1, le=64)] = 2
    max_width: Annotated[int, Field(ge=1, le=64)] = 10
    top_k: Annotated[int, Field(ge=2, le=64)] = 10
    """Candidates whose entropy is the confidence, and the most children of any node."""
    max_nodes: Annotated[int, Field(ge=2, le=512)] = 64
    """Most drafts of one tree; this many are verified in every row, padding included."""
    max_expanded: Annotated[int, Field(ge=1, le=64)] = 6
    """Most nodes of one level that have children; this many are run by the drafter in every row."""
    threshold_scale: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """A child on level l needs a probability above threshold_scale · l / D."""
    threshold: Literal["cumulative", "node"] = "cumulative"
    """Which probability: that of the whole path (the paper's definition), or of the node alone (its text)."""
    threshold_gates: Literal["inclusion", "expansion"] = "inclusion"
    """What it decides: which nodes are in the tree (the paper's definition), or which get children (its text)."""
    parent_probability: Literal["conditional", "cumulative"] = "conditional"
    """Which probability of the parent widens a level."""
    width_rounding: Literal["nearest", "floor"] = "nearest"
    min_children: Annotated[int, Field(ge=0, le=1)] = 1
    """Children that the decay always leaves; 0 with floor ends even the surest tree at depth 3."""
    decay_first_level: bool = False
    """Whether the root's children are also scaled by (0.5 + P_parent), with P_root = 1."""
    depth_rounding: Literal["nearest", "floor", "ceil"] = "nearest"
    count_root: bool = False
    """Whether max_nodes counts the root."""
    order: Literal["best_first", "depth_first"] = "best_first"
    """Who fills the budget: the most probable nodes, or the first in the recursion's order."""
    source: Literal["root", "accepted_leaf", "mean"] = "root"
    """Whose distribution plans the next tree: the root's, the deepest accepted node's, or the mean of all."""
    initial_confidence: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    history_window: Annotated[int, Field(ge=0, le=1000)] = 10
    """Steps whose mean acceptance length moves the deepest depth; 0 is off."""
    history_low: Annotated[float, Field(ge=0.0)] = 2.0
    history_high: Annotated[float, Field(ge=0.0)] = 3.0
    """Thresholds of that mean, the target's own token not counted."""
    first_paths: tuple[tuple[Annotated[int, Field(ge=0, le=63)], ...], ...] = ()
    """Every sample's first tree, before there is anything to plan from; empty: SpecVLM's 25 nodes."""

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
