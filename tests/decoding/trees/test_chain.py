"""Tests the chain policy: ends of drafts, with torch operations and with C++ loops, and the values that it returns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoding.contracts import DraftLogits
from decoding.sampling import RowSampling
from decoding.tree import DraftTree
from decoding.trees.chain import Chain
from models.backends.cpu import attention
from models.backends.cpu.build import Library
from tests.decoding import blocks

V = 9


@pytest.fixture(params=["loops", "torch"])
def has_loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "torch":
        monkeypatch.setattr(attention, "LIBRARY", Library((), {}, "never tried"))
    else:
        assert attention.LIBRARY.library() is not None
    return bool(request.param == "loops")


def grown(policy: Chain, scores: Tensor, depths: Tensor | None) -> DraftTree:
    """A chain in which each row's drafter returns `scores` (b, D, V), level by level."""
    b, num_levels = scores.shape[:2]
    rows = RowSampling(
        torch.zeros(b), torch.zeros(b, dtype=torch.long), torch.ones(b), torch.ones(b), None, False, 0, False
    )
    frontier = policy.start(blocks.slots(*range(b)), torch.full((b,), 8), num_levels, keep_probs=False)
    for level in range(num_levels):
        assert frontier is not None
        assert frontier.depth == level
        frontier = policy.grow(DraftLogits(scores[:, level : level + 1], None, rows, depths))
    assert frontier is None
    return policy.finish()


def test_drafts_end_at_minus_infinity_at_nan_and_at_the_depth_of_the_row(has_loops: bool) -> None:
    scores = torch.randn(5, 4, V, generator=torch.Generator().manual_seed(1))
    scores[1, 2] = -torch.inf
    scores[2, 1, 3] = torch.nan
    scores[3, 3, 0] = torch.inf
    depths = torch.tensor([2, 9, 9, 9, 0])
    tree = grown(Chain(4), scores, depths).within(depths)
    assert tree.valid.long().tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 0, 0, 0, 0],
    ]
    assert tree.num_drafted is not None
    assert tree.num_drafted.tolist() == [2, 2, 1, 3, 0]
    assert tree.failed is not None
    assert tree.failed.tolist() == [False, False, True, True, False]
    sound = scores[[0, 4]]
    assert tree.tokens[[0, 4], 1:].equal(sound.argmax(dim=-1))
    assert tree.tokens[:, 0].tolist() == [8] * 5


def test_without_depths_all_finite_drafts_are_valid(has_loops: bool) -> None:
    scores = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(2))
    tree = grown(Chain(3), scores, None)
    assert tree.valid.all()
    bounded = tree.within(torch.tensor([1, 3]))
    assert bounded.num_drafted is not None
    assert bounded.num_drafted.tolist() == [1, 3]


def test_chains_of_changing_lengths_keep_their_own_constants(has_loops: bool) -> None:
    """What is made once for all chains of a size is not another size's."""
    policy = Chain(3)
    for levels in (2, 3, 1, 2):
        for b in (1, 3):
            tree = grown(policy, torch.randn(b, levels, V), torch.full((b,), 7))
            assert tree.depth.tolist() == [list(range(levels + 1))] * b
            assert tree.parents.tolist() == [list(range(-1, levels))] * b
            assert tree.visible().equal(torch.ones(levels + 1, levels + 1).tril().bool().expand(b, -1, -1))
            assert (tree.num_levels, tree.is_chain) == (levels, True)
