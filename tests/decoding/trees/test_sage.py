"""SAGE's formulas and plans, against numbers worked by hand from the paper's equations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding.trees.confidence import (
    SageSettings,
    bounded_depth,
    confidence,
    level_threshold,
    level_width,
    real_depth,
    real_width,
    whole_depth,
)
from decoding.trees.index_tree import IndexTree, plan_tree
from decoding.trees.sage import SageTree
from decoding.trees.static import SPECVLM_PATHS

PAPER = SageSettings()
FLAT = torch.full((10,), 0.1)
CERTAIN = torch.tensor([1.0] + [0.0] * 9)
HALVES = torch.tensor([0.5, 0.5] + [0.0] * 8)


def plan(probs: Tensor, rules: SageSettings = PAPER, max_depth: int = 8) -> IndexTree:
    row = probs[None]
    return plan_tree(row, confidence(row), torch.tensor([max_depth]), rules)


def paths(tree: IndexTree, row: int = 0) -> list[tuple[int, ...]]:
    """The valid nodes of one row as paths of ranks, in order."""
    node_paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(tree.parents[row].tolist()):
        if parent < 0:
            node_paths.append(())
        else:
            node_paths.append((*node_paths[parent], int(tree.ranks[row, node])))
    return [path for path, real in zip(node_paths, tree.valid[row].tolist(), strict=True) if real and path]


def test_the_confidence_equals_that_of_known_entropies() -> None:
    # H = ln 10, 0, ln 2: α = 1 − H / ln 10.
    expected = [0.0, 1.0, 1 - math.log(2) / math.log(10)]
    assert confidence(torch.stack([FLAT, CERTAIN, HALVES])).tolist() == pytest.approx(expected, abs=1e-6)


def test_depth_and_width_equal_those_of_known_confidences() -> None:
    alpha = torch.tensor([0.0, 0.5, 1.0, 0.69897])
    depth = real_depth(alpha, torch.tensor([8, 8, 8, 8]), PAPER)
    assert depth.tolist() == pytest.approx([3.0, 5.5, 8.0, 6.49485])
    assert whole_depth(depth).tolist() == [3, 6, 8, 6]
    assert real_width(alpha, PAPER).tolist() == pytest.approx([10.0, 6.0, 2.0, 4.40824])


def test_width_decays_with_the_level_and_grows_with_the_parent() -> None:
    width, parent = torch.tensor([[10.0]]), torch.tensor([[1.0, 0.5, 0.1]])
    # Level 1 keeps W = 10; level 2: 10 / 2 · 1.5, · 1.0, · 0.6; level 4: 10 / 4 · the same.
    assert level_width(width, 1, parent).tolist() == [[10, 10, 10]]
    assert level_width(width, 2, parent).tolist() == [[8, 5, 3]]
    assert level_width(width, 4, parent).tolist() == [[4, 3, 2]]
    # 2 / 8 · 0.6 = 0.15: one child.
    assert level_width(torch.tensor([[2.0]]), 8, parent[:, 2:]).tolist() == [[1]]


def test_threshold_uses_the_depth_before_rounding() -> None:
    assert level_threshold(3, torch.tensor([5.5, 8.0]), PAPER).tolist() == pytest.approx([0.3 / 5.5, 0.3 / 8])


def test_the_worked_example_of_the_plan() -> None:
    probs = torch.tensor([0.6, 0.3, 0.1])
    rules = replace(PAPER, top_k=3, max_nodes=5, max_expanded=2)
    tree = plan(probs, rules)
    assert paths(tree) == [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
    assert tree.parents[0].tolist() == [-1, 0, 0, 1, 1, 3]
    assert tree.expanded[0].tolist() == [True, True, False, True, False, False]
    assert paths(plan(probs, replace(rules, max_nodes=12))) == [
        (0,),
        (1,),
        (2,),
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 0, 0, 0),
    ]


def test_a_flat_distribution_gives_ten_children_of_the_root_and_nothing_below() -> None:
    # α = 0, D = 3: θ₁ = 0.033 < 0.1, θ₂ = 0.067 > 0.01.
    tree = plan(FLAT)
    assert paths(tree) == [(rank,) for rank in range(10)]
    assert tree.levels().tolist() == [1]


def test_a_certain_distribution_gives_a_chain_of_depth_eight() -> None:
    assert paths(plan(CERTAIN)) == [(0,) * depth for depth in range(1, 9)]


def test_a_distribution_of_halves_gives_the_levels_of_the_rules() -> None:
    # α = 0.699, D = 6.49, W = 4.41, θ_l = 0.0154 l. Level 2 allows 4.41 / 2 = 2.2 → 2 children, level 3 1.47 → 1.
    # Cumulative: .5, .25, then .25 · .5 = .125, .0625 on level 4 (above .0616), .031 on level 5 (below .077).
    tree = plan(HALVES)
    assert [sum(len(path) == depth for path in paths(tree)) for depth in range(1, 6)] == [2, 4, 4, 4, 0]
    # Per node every .5 passes: one child each down to level 6.
    per_node = plan(HALVES, replace(PAPER, threshold="node"))
    assert [sum(len(path) == depth for path in paths(per_node)) for depth in range(1, 8)] == [2, 4, 4, 4, 4, 4, 0]


def test_the_budget_keeps_the_most_probable_nodes() -> None:
    rules = replace(PAPER, threshold="node", max_nodes=6)
    assert paths(plan(HALVES, rules)) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_history_moves_the_deepest_depth_by_one_within_its_bounds() -> None:
    depth = torch.tensor([5, 5, 5, 3, 8, 5])
    mean = torch.tensor([1.9, 2.5, 3.1, 0.0, 9.0, 1.0])
    full = torch.tensor([True, True, True, True, True, False])
    assert bounded_depth(depth, mean, full, PAPER).tolist() == [4, 5, 6, 3, 8, 5]
    assert bounded_depth(depth, mean, full, replace(PAPER, depth_cap=12)).tolist() == [4, 5, 6, 3, 9, 5]


def test_the_first_tree_has_the_levels_of_the_static_one() -> None:
    assert [sum(len(path) == depth for path in SPECVLM_PATHS) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    tree = IndexTree.of_paths(SPECVLM_PATHS, 65, torch.device("cpu"))
    assert paths(tree) == sorted(SPECVLM_PATHS, key=lambda path: (len(path), path))
    assert int(tree.expanded.sum()) == 11
    assert SageTree().max_nodes == 65


@settings(max_examples=80, deadline=None)
@given(
    weights=st.lists(st.lists(st.floats(0, 8), min_size=10, max_size=10), min_size=1, max_size=3),
    rules=st.builds(
        SageSettings,
        threshold=st.sampled_from(["cumulative", "node"]),
        threshold_gates=st.sampled_from(["inclusion", "expansion"]),
        max_nodes=st.sampled_from([1, 7, 25, 64]),
        max_expanded=st.sampled_from([1, 3, 6, 20]),
    ),
    max_depth=st.integers(3, 8),
)
def test_every_plan_is_a_tree_within_its_rules(weights: list[list[float]], rules: SageSettings, max_depth: int) -> None:
    probs = torch.tensor(weights).softmax(-1).sort(-1, descending=True).values
    alpha = confidence(probs)
    tree = plan_tree(probs, alpha, torch.full((len(weights),), max_depth), rules)
    depth = real_depth(alpha, torch.tensor(max_depth), rules)
    for row in range(len(weights)):
        node_paths = paths(tree, row)
        assert len(set(node_paths)) == len(node_paths) <= rules.max_nodes
        assert (0,) in node_paths, "every row drafts something"
        assert [len(path) for path in node_paths] == sorted(len(path) for path in node_paths)
        positions: dict[int, list[int]] = {}
        for node in range(tree.valid.shape[1]):
            if tree.expanded[row, node]:
                positions.setdefault(int(tree.depth[row, node]), []).append(int(tree.frontier_index[row, node]))
        for level, taken in positions.items():
            assert taken == list(range(len(taken))), "frontier indices are dense"
            assert level == 0 or len(taken) <= rules.max_expanded
        for path in node_paths:
            assert not path[:-1] or path[:-1] in node_paths, "a node without its parent"
            level = len(path)
            assert level <= int(whole_depth(depth)[row])
            chance = math.prod(float(probs[row, rank]) for rank in path)
            tested = chance if rules.threshold == "cumulative" else float(probs[row, path[-1]])
            if rules.threshold_gates == "expansion":
                # What the threshold asks is asked of those that have children.
                is_tested, path_tested = len(path) > 1, path[:-1]
                level, tested = level - 1, 1.0
                if is_tested:
                    chance = math.prod(float(probs[row, rank]) for rank in path_tested)
                    tested = chance if rules.threshold == "cumulative" else float(probs[row, path_tested[-1]])
            else:
                is_tested = path != (0,)
            assert not is_tested or tested > float(level_threshold(level, depth, rules)[row]) - 1e-6
    alone = [plan_tree(probs[row : row + 1], alpha[row : row + 1], torch.tensor([max_depth]), rules) for row in
             range(len(weights))]  # fmt: skip
    assert torch.equal(tree.parents, torch.cat([single.parents for single in alone])), "a row depends on the others"


def test_a_threshold_that_gates_expansion_keeps_children_below_it_and_gives_them_none() -> None:
    # P̃ = 0.6, 0.3, 0.1: α = 0.61 (k = 10), D = 6.05, W = 5.1. θ_1 = 0.0165, θ_2 = 0.033, θ_3 = 0.0496.
    probs = torch.tensor([0.6, 0.3, 0.1] + [0.0] * 7)
    included = paths(plan(probs))
    gated = paths(plan(probs, replace(PAPER, threshold_gates="expansion", max_expanded=10)))
    assert set(included) < set(gated)
    # The fourth and fifth children have no probability, but are within the width; nothing is below them.
    assert {(3,), (4,)} <= set(gated) - set(included)
    assert not [path for path in gated if path[:1] in ((3,), (4,)) and len(path) > 1]
    # W_2 = 2.55 · (0.5 + 0.6) = 2.8 → 3 below (0,), and (0, 2) has 0.06; below (2,) with 0.1 there is (2, 0), 0.06 too.
    # Of the third level below (0, 1), 0.18, two are in: 0.108, and 0.054 only just above θ_3.
    assert (0, 0, 0) in gated
    cumulative = {path: math.prod(float(probs[rank]) for rank in path) for path in gated}
    depth = real_depth(confidence(probs[None]), torch.tensor([8]), PAPER)
    for path in gated:
        if path[:-1]:
            assert cumulative[path[:-1]] > float(level_threshold(len(path) - 1, depth, PAPER)[0])
    below = [path for path in gated if cumulative[path] <= float(level_threshold(len(path), depth, PAPER)[0])]
    assert set(below) == set(gated) - set(included), "new nodes are below the threshold"


def test_certainty_leaves_a_chain_whichever_way_the_threshold_gates() -> None:
    rules = replace(PAPER, threshold_gates="expansion")
    chain = [tuple([0] * depth) for depth in range(1, 9)]
    assert paths(plan(CERTAIN)) == chain
    # W(1) = 2: the second child of the root is within the width, and a leaf.
    assert paths(plan(CERTAIN, rules)) == sorted([*chain, (1,), (0, 1)], key=lambda path: (len(path), path))


def test_plans_of_64_nodes_fit_into_25() -> None:
    probs = many_distributions()
    wide, narrow = (
        plan_tree(probs, confidence(probs), torch.full((len(probs),), 8), replace(PAPER, max_nodes=nodes))
        for nodes in (64, 25)
    )
    for name in ("parents", "ranks", "depth", "valid", "expanded", "frontier_index"):
        assert torch.equal(getattr(wide, name)[:, :26], getattr(narrow, name)), name
    assert not wide.valid[:, 26:].any()


def many_distributions() -> Tensor:
    """From flat to peaked, of several shapes."""
    generator = torch.Generator().manual_seed(0)
    rank = torch.arange(10)
    share = torch.linspace(0.05, 1, 200)[:, None]
    shapes = [
        share**rank,
        (rank + 1.0) ** -(6 * share),
        torch.cat([share, ((1 - share) / 9).expand(-1, 9)], dim=1),
        (rank < torch.arange(1, 11)[:, None]).float(),
        *(torch.rand(400, 10, generator=generator).pow(power) for power in (0.5, 1, 2, 4, 8, 16, 32)),
    ]
    probs = torch.cat(shapes).sort(dim=1, descending=True).values
    return probs / probs.sum(dim=1, keepdim=True)


def test_the_cumulative_threshold_needs_fewer_places_than_the_defaults_give() -> None:
    # What the settings' default of six expanded nodes per level, and the advice of 25 nodes, rest on.
    probs = many_distributions()
    wide = plan_tree(probs, confidence(probs), torch.full((len(probs),), 8), replace(PAPER, max_expanded=32))
    expanded = [int(((wide.depth == depth) & wide.expanded).sum(1).max()) for depth in range(1, 9)]
    assert max(expanded) == 6 == PAPER.max_expanded
    assert int(wide.valid.sum(1).max()) - 1 == 22
