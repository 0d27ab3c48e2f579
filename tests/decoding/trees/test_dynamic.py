"""Tests EAGLE-2's dynamic tree: worked examples, closed under ancestors, independent of other rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding.contracts import DraftLogits
from decoding.sampling import RowSampling
from decoding.tree import DraftTree, Frontier
from decoding.trees import DynamicTree
from models.kv.lanes import SlotBatch

Table = Callable[[Frontier], Tensor]


def rows_of(b: int, sampled: bool = False) -> RowSampling:
    ones = torch.ones(b)
    off = torch.zeros(b, dtype=torch.long)
    return RowSampling(ones if sampled else ones * 0, off, ones, ones, None, sampled, 0, False)


def grow(
    tree: DynamicTree,
    table: Table,
    b: int,
    num_levels: int = 99,
    noise: Tensor | None = None,
    keep_probs: bool = False,
    max_depth: Tensor | None = None,
) -> DraftTree:
    """Grow a tree from a table of logits; `noise` (levels, V) is the same for all rows."""
    slots = SlotBatch(torch.arange(b), tuple(range(b)), (1,) * b)
    frontier: Frontier | None = tree.start(slots, torch.full((b,), 9), num_levels, keep_probs)
    while frontier is not None:
        draws = None if noise is None else noise[frontier.depth].expand(b, 1, -1)
        frontier = tree.grow(DraftLogits(table(frontier), draws, rows_of(b, noise is not None), max_depth))
    return tree.finish()


def by_last_token(probs: dict[int, list[float]]) -> Table:
    """Distributions that depend on a node's token only."""

    def table(frontier: Frontier) -> Tensor:
        return torch.tensor([[probs[int(token)] for token in row] for row in frontier.tokens]).log()

    return table


def nodes(tree: DraftTree, row: int = 0) -> list[tuple[int, ...]]:
    """Valid nodes as paths of tokens, in the tree's order."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[int(tree.parents[row, node])], int(tree.tokens[row, node])))
    return [path for path, valid in zip(paths, tree.valid[row], strict=True) if valid][1:]


# Token 0 is likely and is followed by 1 for certain almost; 1 and 2 are followed by anything.
WORKED = {
    9: [0.6, 0.3, 0.1],
    0: [0.05, 0.9, 0.05],
    1: [0.5, 0.4, 0.1],
    2: [0.4, 0.3, 0.3],
}


def test_a_tree_worked_by_hand() -> None:
    """Beam 2, two expansions. Level 1: 0 (.6), 1 (.3). Level 2: 01 (.54), 00 (.03); 10 (.15), 11 (.12).

    The beam is now 01 and 10. Level 3: 010 (.27), 011 (.216); 101 (.135), 100 (.0075 = .15 · .05, tied with 102).
    The six best are 0, 01, 1, 010, 011, 10.
    """
    tree = grow(DynamicTree(top_k=2, depth=2, total_tokens=7), by_last_token(WORKED), 1)
    assert nodes(tree) == [(0,), (1,), (0, 1), (1, 0), (0, 1, 0), (0, 1, 1)]
    assert tree.parents[0].tolist() == [-1, 0, 0, 1, 2, 3, 3]
    assert tree.depth[0].tolist() == [0, 1, 1, 2, 2, 3, 3]
    # Grown in order: root 0; level 1 is 1 2; children of 0: 3 4, of 1: 5 6, of 01: 7 8.
    assert tree.origin[0].tolist() == [0, 1, 2, 3, 5, 7, 8]
    assert tree.num_levels == 3
    assert tree.draft_probs is None


def test_the_beam_is_the_best_of_all_children_of_a_level_and_not_of_each_node() -> None:
    """With 0 at .6 · (.5, .4), both beam places of level 2 go below 0, none below 1 (.3 · .9 = .27)."""
    probs = WORKED | {0: [0.5, 0.5, 0.0], 1: [0.9, 0.05, 0.05], 9: [0.7, 0.2, 0.1]}
    frontiers = []

    def table(frontier: Frontier) -> Tensor:
        frontiers.append(frontier)
        return by_last_token(probs)(frontier)

    grow(DynamicTree(2, 2, 7), table, 1)
    assert frontiers[2].path.tolist() == [[[0, 0], [0, 1]]]
    assert frontiers[2].parents.tolist() == [[1, 1]]
    assert frontiers[2].nodes.tolist() == [[3, 4]]


def test_of_equal_scores_the_parent_is_kept() -> None:
    """A drafter that is certain gives parent, child and grandchild the score 0: only depth can distinguish them."""

    def certain(frontier: Frontier) -> Tensor:
        return torch.tensor([0.0, -1e9, -2e9]).expand(*frontier.tokens.shape, 3)

    for total in range(2, 8):
        tree = grow(DynamicTree(top_k=2, depth=4, total_tokens=total), certain, 1)
        certain_line = [(0,) * deep for deep in range(1, min(5, total - 1) + 1)]
        assert [path for path in nodes(tree) if 1 not in path] == certain_line


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    top_k=st.integers(1, 4),
    depth=st.integers(0, 4),
    share=st.floats(0.0, 1.0),
    coarse=st.booleans(),
)
def test_every_kept_node_has_its_parent_and_better_nodes_are_never_left_out(
    seed: int, top_k: int, depth: int, share: float, coarse: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_grown = top_k + depth * top_k**2
    total = 2 + int(share * (num_grown - 1))
    scores: dict[tuple[int, ...], float] = {}
    table: dict[tuple[int, ...], Tensor] = {}

    def logits(frontier: Frontier) -> Tensor:
        out = torch.zeros(1, frontier.tokens.shape[1], 6)
        for f, path in enumerate(frontier.path[0].tolist()):
            # Coarse logits are often certain, so that scores tie along whole branches.
            drawn = torch.randn(6, generator=generator) * (200.0 if coarse else 2.0)
            table[tuple(path)] = out[0, f] = drawn.round() if coarse else drawn
        return out

    tree = grow(DynamicTree(top_k, depth, total), logits, 1)
    kept = nodes(tree)
    assert len(kept) == len(set(kept)) == total - 1
    assert all(path[:-1] == () or path[:-1] in kept for path in kept)
    for path, values in table.items():
        best = values.log_softmax(-1).topk(top_k)
        for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            scores[(*path, token)] = scores.get(path, 0.0) + value
    worst = min(scores[path] for path in kept)
    assert not [path for path, score in scores.items() if score > worst + 1e-4 and path not in kept]


def test_shared_noise_ranks_children_and_independent_noise_does_not() -> None:
    noise = torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.0, 5.0]])
    shared = grow(DynamicTree(1, 1, 3), by_last_token(WORKED), 1, noise=noise)
    # log .6 < log .3 + 3; then log .5 < log .1 + 5.
    assert nodes(shared) == [(1,), (1, 2)]
    rejected = grow(DynamicTree(1, 1, 3), by_last_token(WORKED), 1, noise=noise, keep_probs=True)
    assert nodes(rejected) == [(0,), (0, 1)]
    assert rejected.draft_probs is None


def test_a_rows_tree_does_not_depend_on_how_deep_its_neighbours_may_go() -> None:
    """A row with room for one more draft gets the children of its root, not what a deeper neighbour leaves of them."""
    probs = WORKED | {9: [0.9, 0.05, 0.05], 0: [0.9, 0.05, 0.05]}
    policy = DynamicTree(top_k=3, depth=2, total_tokens=5)
    together = grow(policy, by_last_token(probs), 2, max_depth=torch.tensor([1, 3]))
    alone = grow(policy, by_last_token(probs), 1, num_levels=1, max_depth=torch.tensor([1]))
    assert nodes(together, 0) == nodes(alone) == [(0,), (1,), (2,)]
    assert (0, 0, 0) in nodes(together, 1)


def test_filtered_tokens_are_never_valid_nodes() -> None:
    def one_left(frontier: Frontier) -> Tensor:
        return torch.tensor([-torch.inf, 0.0, -torch.inf]).expand(*frontier.tokens.shape, 3)

    tree = grow(DynamicTree(3, 2, 12), one_left, 2)
    assert nodes(tree, 1) == [(1,), (1, 1), (1, 1, 1)]
    assert tree.num_nodes == 12


@pytest.mark.parametrize(("top_k", "depth", "total"), [(2, 1, 8), (0, 1, 2), (2, -1, 2), (2, 1, 1)])
def test_impossible_sizes_are_refused(top_k: int, depth: int, total: int) -> None:
    with pytest.raises(AssertionError):
        DynamicTree(top_k, depth, total)
