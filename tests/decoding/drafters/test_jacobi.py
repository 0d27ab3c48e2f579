"""Speculative Jacobi decoding step by step, with drafts worked by hand."""

from __future__ import annotations

import pytest
import torch

from decoding.acceptance import Exact
from decoding.contracts import DraftLogits
from decoding.drafters import JacobiDrafter
from decoding.tree import DraftTree, Frontier
from decoding.trees import Chain, StaticTree
from models.kv.lanes import SlotBatch
from tests.decoding import blocks


def opened(window: int, *firsts: int, grid: int | None = None) -> tuple[JacobiDrafter, SlotBatch]:
    """A drafter whose slots have generated one token each."""
    drafter = JacobiDrafter(grid)
    drafter.open(blocks.spec(max_levels=window))
    slots = blocks.slots(*range(len(firsts)))
    drafter.admit(slots, torch.tensor(firsts), [])
    return drafter, slots


def grown(drafter: JacobiDrafter, slots: SlotBatch, num_levels: int) -> DraftTree:
    """The chain of a step of `num_levels` levels."""
    root = drafter._output[slots.index].gather(1, drafter._length[slots.index][:, None] - 1)[:, 0]
    if num_levels == 0:
        return DraftTree.root_only(root)
    like = blocks.verification(DraftTree.root_only(root), torch.zeros(len(root), 1, blocks.VOCAB_SIZE), where=slots)
    policy = Chain(num_levels)
    frontier: Frontier | None = policy.start(slots, root, num_levels, False)
    while frontier is not None:
        frontier = policy.grow(DraftLogits(drafter.draft(slots, frontier), None, like.rows))
    return policy.finish()


def step(drafter: JacobiDrafter, slots: SlotBatch, num_levels: int, *choices: list[int]) -> list[list[int]]:
    """Run a step in which the target takes `choices[row][i]` after node i; return the drafts of the step."""
    tree = grown(drafter, slots, num_levels)
    verification = blocks.verification(tree, blocks.wanting(*choices), where=slots)
    drafter.commit(verification, Exact().accept(verification))
    return tree.tokens[:, 1:].tolist()


def test_choices_after_the_first_wrong_draft_are_the_next_drafts() -> None:
    drafter, slots = opened(4, 10)
    # Nothing is known: the pending token is repeated. The target takes 11, so no draft is right.
    assert step(drafter, slots, 4, [11, 12, 13, 14, 15]) == [[10, 10, 10, 10]]
    # The choices 12 … 15 were made one position after the pending token 11, and further on.
    assert step(drafter, slots, 4, [12, 20, 21, 22, 23]) == [[12, 13, 14, 15]]
    # 12 was right and 20 follows it; 21 … 23 remain of the choices, and the last is repeated.
    assert step(drafter, slots, 4, [21, 22, 23, 23, 24]) == [[21, 22, 23, 23]]
    # A fixed point is accepted as a whole; nothing is left of its choices but the pending token.
    assert drafter._output[0, : int(drafter._length[0])].tolist() == [10, 11, 12, 20, 21, 22, 23, 23, 24]
    assert step(drafter, slots, 4, [0, 0, 0, 0, 0]) == [[24, 24, 24, 24]]


def test_rows_that_accept_differently_each_keep_their_own_choices() -> None:
    drafter, slots = opened(3, 10, 20)
    step(drafter, slots, 3, [11, 12, 13, 14], [21, 22, 23, 24])
    assert step(drafter, slots, 3, [12, 13, 14, 15], [30, 31, 32, 33]) == [[12, 13, 14], [22, 23, 24]]
    assert step(drafter, slots, 3, [0] * 4, [0] * 4) == [[15, 15, 15], [31, 32, 33]]


def test_a_refilled_slot_forgets_the_former_sample() -> None:
    drafter, slots = opened(3, 10, 20)
    step(drafter, slots, 3, [11, 12, 13, 14], [21, 22, 23, 24])
    drafter.admit(blocks.slots(1), torch.tensor([30]), [])
    assert step(drafter, slots, 3, [0] * 4, [0] * 4) == [[12, 13, 14], [30, 30, 30]]


def test_shorter_steps_and_steps_without_drafts_keep_the_older_drafts_at_their_positions() -> None:
    drafter, slots = opened(4, 10)
    step(drafter, slots, 4, [11, 12, 13, 14, 15])
    # Two levels only: 12 is wrong, and the choice 31 replaces 13; 14 and 15 are still drafts of their positions.
    assert step(drafter, slots, 2, [30, 31, 32]) == [[12, 13]]
    assert drafter._output[0, :7].tolist() == [10, 11, 30, 31, 32, 15, 15]
    # Drafting is paused: the target goes to 31 by itself, and to 33 against its draft.
    assert step(drafter, slots, 0, [31]) == [[]]
    assert step(drafter, slots, 0, [33]) == [[]]
    assert step(drafter, slots, 4, [0] * 5) == [[15, 15, 15, 15]]


@pytest.mark.parametrize("grid", [2, 3])
def test_codes_are_filled_from_the_image_row_above(grid: int) -> None:
    drafter, slots = opened(4, 10, grid=grid)
    # An image of one code: only the positions below it have a code above.
    first = {2: [10, 10, 10, 10], 3: [10, 10, 10, 10]}
    assert step(drafter, slots, 4, [11, 12, 13, 14, 15]) == [first[grid]]
    # Known are 10, 11 and the choices 12 … 15 at the positions 2 … 5.
    assert step(drafter, slots, 4, [12, 13, 20, 21, 22]) == [[12, 13, 14, 15]]
    # Known are 10 … 13, 20 and the choices 21, 22 at the positions 5, 6; 7 and 8 are filled from above.
    below = {2: [21, 22, 21, 22], 3: [21, 22, 20, 21]}
    assert step(drafter, slots, 4, [0] * 5) == [below[grid]]


def test_a_window_wider_than_a_row_is_filled_from_filled_rows() -> None:
    drafter, slots = opened(7, 10, grid=2)
    step(drafter, slots, 1, [11, 12])
    # The older drafts, 10 repeated, are known up to position 7; position 8 is filled from position 6.
    assert drafter._output[0, :9].tolist() == [10, 11, 12, 10, 10, 10, 10, 10, 10]
    step(drafter, slots, 7, [12, 13, 14, 15, 16, 17, 18, 19])
    # Known are ten tokens; 19 is the last one, and position 10 is filled from position 8.
    assert drafter._output[0, :10].tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    assert grown(drafter, slots, 7).tokens[0].tolist() == [13, 14, 15, 16, 17, 18, 19, 18]


def test_a_tree_that_is_no_chain_is_an_error() -> None:
    drafter, slots = opened(2, 10)
    tree = blocks.tree([[10, 11, 12]], [-1, 0, 0])
    verification = blocks.verification(tree, blocks.wanting([11, 0, 0]), where=slots)
    with pytest.raises(AssertionError, match="only along a chain"):
        drafter.commit(verification, Exact().accept(verification))
    assert StaticTree([(0,), (0, 0)]).is_chain
