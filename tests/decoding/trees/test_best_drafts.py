"""The best drafts of all rows: as many as asked for, none without its parent, and none worse than one left out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding import Engine, Method, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.contracts import Judgement
from decoding.controllers.base import Choice, Controller
from decoding.drafters import ModelDrafter
from decoding.tree import DraftTree, Verdict
from decoding.trees import Chain, DynamicTree, StaticTree, branching_paths
from tests import toys
from tests.conformance import checks

PROBS = st.sampled_from([0.0, 0.1, 0.5, 0.5, 0.9, 1.0])


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Trees of several rows with confidences that never rise along a path; many are equal."""
    num_rows, num_nodes = draw(st.integers(1, 5)), draw(st.integers(2, 7))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, num_nodes)]
    confidence, valid = torch.ones(num_rows, num_nodes), torch.ones(num_rows, num_nodes, dtype=torch.bool)
    for row in range(num_rows):
        for node in range(1, num_nodes):
            confidence[row, node] = confidence[row, parents[node]] * draw(PROBS)
            valid[row, node] = valid[row, parents[node]] and draw(st.integers(0, 4)) > 0
    depth = [0] * num_nodes
    for node in range(1, num_nodes):
        depth[node] = depth[parents[node]] + 1
    numbers = torch.arange(num_nodes).expand(num_rows, -1)
    below = torch.tensor(parents).expand(num_rows, -1)
    depths = torch.tensor(depth).expand(num_rows, -1)
    return DraftTree(numbers, below, depths, valid, numbers, max(depth), confidence=confidence)


@given(trees(), st.data())
def test_the_best_drafts_of_all_rows_are_kept(tree: DraftTree, data: st.DataObject) -> None:
    assert tree.confidence is not None
    num_rows, num_nodes = tree.tokens.shape
    num = data.draw(st.integers(0, num_rows * (num_nodes - 1)))
    kept = tree.best(num).valid
    assert bool(kept[:, 0].all())
    assert bool((kept <= tree.valid).all())
    drafts, left_out = kept[:, 1:], (tree.valid & ~kept)[:, 1:]
    assert int(drafts.sum()) == min(num, int(tree.valid[:, 1:].sum()))
    if drafts.any() and left_out.any():
        assert float(tree.confidence[:, 1:][drafts].min()) >= float(tree.confidence[:, 1:][left_out].max())
    above = kept.gather(1, tree.parents.clamp_min(0))
    assert bool(above[:, 1:][drafts].all()), "a draft was kept without its parent"
    assert torch.equal(tree.best(num).num_drafted, kept.sum(1) - 1)  # type: ignore[arg-type]


class Fixed(Controller):
    limits_drafts = True

    def choose(self, num_active: int, max_levels: int, num_missed: int, num_unread: int) -> Choice:
        return Choice(max_levels, "best", num_drafts=num_active)


class Watcher(Exact):
    """Counts verified drafts, and compares the confidences of nodes with those of their parents."""

    def __init__(self) -> None:
        self.num_nodes = 0

    def judge(self, judgement: Judgement) -> Verdict:
        tree = judgement.tree
        if tree.num_levels == 0:
            return super().judge(judgement)
        assert tree.confidence is not None
        assert int(tree.valid[:, 1:].sum()) <= len(judgement.slots.ids)
        for row in range(tree.tokens.shape[0]):
            for node in range(1, tree.num_nodes):
                above = int(tree.parents[row, node])
                if above >= 0 and tree.origin[row, node] > 0:
                    assert float(tree.confidence[row, node]) <= float(tree.confidence[row, above]) + 1e-6
                    self.num_nodes += 1
        return super().judge(judgement)


@pytest.mark.parametrize("tree", [Chain(4), StaticTree(branching_paths([2, 2])), DynamicTree(3, 2, 12)], ids=type)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=str)
def test_steps_verify_no_more_drafts_than_are_chosen(tree: Chain, sampling: Sampling) -> None:
    target = toys.target("llama")
    drafter = ModelDrafter(toys.perturbed("llama", 0.02), [Full()], target.vocab_size)
    watcher = Watcher()
    engine = Engine(target, Method(drafter, tree, watcher, Fixed()), 3, 96)
    wanted = checks.requests("llama", 7, sampling)
    done = checks.run(engine, wanted)
    oracle = checks.generated if sampling.temperature == 0 else checks.referenced
    for request in wanted:
        assert done[request.sample_id].token_ids == oracle("llama", request, target.eos_ids)
    assert watcher.num_nodes > 50
