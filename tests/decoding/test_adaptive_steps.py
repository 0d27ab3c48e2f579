"""Tests SAGE's policies and prompt lookup step by step on given logits, without device synchronisation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.acceptance import Exact
from decoding.contracts import Drafter, DraftLogits, TreePolicy, VerificationOutput
from decoding.drafters import LookupDrafter
from decoding.drafters.lookup import find_match
from decoding.tree import NO_TOKEN, AcceptanceResult, DraftTree, Frontier
from decoding.trees import Chain, OnlineSageTree, SageSettings, SageTree
from models.kv.lanes import SlotBatch
from tests.decoding import blocks

pytestmark = pytest.mark.slow

FLAT, SURE, LINE = 10, 11, 12
"""Tokens after which the drafter below is uniform over ten candidates, is certain, and halves the chance each time."""
NONE = -torch.inf


def after(token: int) -> Tensor:
    """Logits (V,): candidates are the tokens from 20 on, in order."""
    logits = torch.full((blocks.VOCAB_SIZE,), NONE)
    if token == FLAT:
        logits[20:30] = -1e-4 * torch.arange(10)
    elif token == SURE:
        logits[SURE] = 0.0
    else:
        logits[20:30] = -torch.arange(10) * torch.tensor(2.0).log()
    return logits


TABLE = torch.stack([after(token) for token in range(blocks.VOCAB_SIZE)])


def grown(policy: TreePolicy, slots: SlotBatch, root: Tensor, num_levels: int, like: VerificationOutput) -> DraftTree:
    """What the level loop does, with the table above for a drafter."""
    frontier: Frontier | None = policy.start(slots, root, num_levels, False)
    while frontier is not None:
        assert frontier.nodes.shape == frontier.tokens.shape == frontier.parents.shape
        assert frontier.path.shape[2] == frontier.depth
        frontier = policy.grow(DraftLogits(TABLE[frontier.tokens], None, like.rows))
    return policy.finish()


def step(policy: TreePolicy, slots: SlotBatch, root: Tensor, num_levels: int, num_taken: Tensor) -> Any:
    """One step of which `num_taken` drafts along first children were accepted: the tree and the levels wanted next."""
    b = root.shape[0]
    like = blocks.verification(DraftTree.root_only(root), torch.zeros(b, 1, blocks.VOCAB_SIZE), where=slots)
    tree = grown(policy, slots, root, num_levels, like)
    first = [torch.zeros(b, dtype=torch.long)]
    for _ in range(num_levels):
        child = (tree.parents == first[-1][:, None]).long().argmax(dim=1)
        first.append(child)
    path = torch.stack(first, dim=1)
    result = AcceptanceResult(path, num_taken + 1, root, torch.zeros_like(path, dtype=torch.bool))
    return tree, policy.commit(replace(like, tree=tree), result)


def lines(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    """The valid drafts of a row, each as the tokens on its way from the root."""
    node_paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(tree.parents[row].tolist()):
        node_paths.append((*node_paths[parent], int(tree.tokens[row, node])) if parent >= 0 else ())
    return {line for line, real in zip(node_paths, tree.valid[row].tolist(), strict=True) if real and line}


def test_rows_of_one_batch_get_trees_of_their_own_shape() -> None:
    policy = SageTree()
    policy.open(blocks.spec())
    slots, root = blocks.slots(2, 0), torch.tensor([FLAT, SURE])
    policy.reset(slots)
    tree, levels = step(policy, slots, root, 8, torch.tensor([0, 0]))
    # The first tree is the static one: 25 nodes where there are candidates, one line where there is only one.
    assert tree.valid.sum(1).tolist() == [26, 6]
    assert levels.tolist() == [1, 8]
    tree, levels = step(policy, slots, root, 8, torch.tensor([0, 8]))
    assert lines(tree, 0) == {(token,) for token in range(20, 30)}
    assert lines(tree, 1) == {(SURE,) * depth for depth in range(1, 9)}
    assert tree.tokens[0, 1:11].tolist() == list(range(20, 30)), "siblings stand in draw order"
    assert policy.extras(2)["tree_depth_mean"] == pytest.approx((5 + 1) / 2)
    assert policy.extras(2)["tree_width_mean"] == pytest.approx((4 + 10) / 2)
    assert policy.extras(0)["confidence_mean"] == pytest.approx(1.0)


def test_padding_is_masked_and_attends_only_to_itself() -> None:
    policy = SageTree()
    policy.open(blocks.spec())
    slots = blocks.slots(0, 1)
    policy.reset(slots)
    root = torch.tensor([FLAT, SURE])
    step(policy, slots, root, 8, torch.tensor([0, 0]))
    tree, _ = step(policy, slots, root, 8, torch.tensor([0, 0]))
    visible = tree.visible()
    for row in range(2):
        padding = (~tree.valid[row]).nonzero()[:, 0].tolist()
        assert len(padding) == 64 - (10, 8)[row]
        for node in padding:
            assert visible[row, node].nonzero()[:, 0].tolist() == [node]
            assert visible[row, :, node].nonzero()[:, 0].tolist() == [node]


def test_a_step_of_few_levels_has_few_columns() -> None:
    policy = SageTree()
    policy.open(blocks.spec())
    slots, root = blocks.slots(0), torch.tensor([FLAT])
    policy.reset(slots)
    step(policy, slots, root, 5, torch.tensor([0]))
    tree, _ = step(policy, slots, root, 1, torch.tensor([0]))
    assert tree.num_nodes == 11
    assert tree.num_levels == 1


def test_history_lowers_and_raises_the_deepest_tree_once_its_window_is_full() -> None:
    policy = SageTree(SageSettings(history_window=3))
    policy.open(blocks.spec())
    slots, root = blocks.slots(1, 3), torch.tensor([SURE, SURE])
    policy.reset(slots)
    wanted = []
    for taken in ([0, 3], [0, 3], [0, 3], [5, 0], [9, 0], [0, 4], [0, 9]):
        wanted.append(step(policy, slots, root, 8, torch.tensor(taken).clamp_max(8))[1].tolist())
    # Row 0: means of three 0, 5/3, 13/3, 13/3, 8/3. Row 1: 3, 2, 1, 4/3, 4.
    assert wanted == [[8, 8], [8, 8], [7, 8], [6, 8], [7, 7], [8, 6], [8, 7]]
    policy.reset(blocks.slots(1))
    assert step(policy, slots, root, 8, torch.tensor([0, 3]))[1].tolist() == [8, 8]


def test_a_root_without_candidates_does_not_change_the_next_plan() -> None:
    policy = SageTree()
    policy.open(blocks.spec())
    slots, root = blocks.slots(0), torch.tensor([SURE])
    policy.reset(slots)
    like = blocks.verification(DraftTree.root_only(root), torch.zeros(1, 1, blocks.VOCAB_SIZE), where=slots)
    step(policy, slots, root, 8, torch.tensor([8]))
    frontier: Frontier | None = policy.start(slots, root, 8, False)
    while frontier is not None:
        frontier = policy.grow(
            DraftLogits(torch.full((1, frontier.nodes.shape[1], blocks.VOCAB_SIZE), NONE), None, like.rows)
        )
    tree = policy.finish()
    assert tree.valid.sum().item() == 1
    nothing = AcceptanceResult(
        torch.zeros(1, 9, dtype=torch.long), torch.tensor([1]), root, torch.zeros(1, 9, dtype=torch.bool)
    )
    assert policy.commit(replace(like, tree=tree), nothing).tolist() == [8]  # type: ignore[union-attr]
    assert policy.extras(0)["confidence_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize(("source", "expected"), [("root", 8), ("accepted_leaf", 1), ("mean", 4)])
def test_the_next_tree_is_planned_from_the_chosen_distribution(source: Any, expected: int) -> None:
    # A sure root, whose one child is followed by ten equal candidates.
    policy = SageTree(SageSettings(source=source), [(0,), (0, 0)])
    policy.open(blocks.spec())
    slots, root = blocks.slots(0), torch.tensor([SURE])
    policy.reset(slots)
    like = blocks.verification(DraftTree.root_only(root), torch.zeros(1, 1, blocks.VOCAB_SIZE), where=slots)
    frontier = policy.start(slots, root, 2, False)
    second = policy.grow(DraftLogits(TABLE[frontier.tokens], None, like.rows))
    assert second is not None
    policy.grow(DraftLogits(TABLE[torch.full_like(second.tokens, FLAT)], None, like.rows))
    tree = policy.finish()
    path = torch.tensor([[0, 1, 2]])
    result = AcceptanceResult(path, torch.tensor([3]), root, torch.zeros_like(path, dtype=torch.bool))
    # The mean of certainty and ten equal chances: P̃ = (.55, .05, …), α = 0.5, D = 5.5: the levels' best have .55, .30,
    # .17, .09, .05, and θ = .018 l: .073 on level 4, .091 on level 5.
    levels = policy.commit(replace(like, tree=tree), result)
    assert levels is not None
    assert levels.tolist() == [expected]


def test_an_online_tree_follows_the_distributions_that_it_meets() -> None:
    policy = OnlineSageTree()
    policy.open(blocks.spec())
    slots, root = blocks.slots(0, 1, 2), torch.tensor([FLAT, SURE, LINE])
    policy.reset(slots)
    tree, levels = step(policy, slots, root, 8, torch.tensor([0, 8, 0]))
    assert lines(tree, 0) == {(token,) for token in range(20, 30)}
    assert lines(tree, 1) == {(SURE,) * depth for depth in range(1, 9)}
    # P̃ = ½, ¼, … renormalised, the same below every node: the plan's own assumption, so both must agree.
    planned = SageTree()
    planned.open(blocks.spec())
    planned.reset(slots)
    step(planned, slots, root, 8, torch.tensor([0, 8, 0]))
    again, _ = step(planned, slots, root, 8, torch.tensor([0, 8, 0]))
    assert lines(tree, 2) == lines(again, 2)
    assert len(lines(tree, 2)) > 8
    assert levels.tolist() == [8, 8, 8]


# --- look-up ---------------------------------------------------------------------------------------------------------


def match_position(tokens: list[int], **options: Any) -> int | None:
    text = torch.tensor([[*tokens, NO_TOKEN, NO_TOKEN]])
    start, num_matched = find_match(
        text,
        torch.tensor([len(tokens)]),
        options.get("least", 1),
        options.get("most", 3),
        options.get("latest", True),
    )
    assert num_matched == 0 or options.get("least", 1) <= num_matched <= options.get("most", 3)
    return int(start) if num_matched else None


def test_the_longest_match_is_copied_and_among_equals_the_latest_or_first() -> None:
    assert match_position([5, 6, 7, 8, 5, 6]) == 2
    assert match_position([5, 6, 7, 9, 6, 7, 5, 6, 7]) == 3, "three tokens beat two nearer ones"
    assert match_position([5, 6, 7, 9, 6, 7, 5, 6, 7], most=2) == 6
    assert match_position([5, 6, 7, 9, 6, 7, 5, 6, 7], most=2, latest=False) == 3
    assert match_position([5, 6, 7, 8]) is None
    assert match_position([5, 6, 7, 6], least=2) is None
    assert match_position([5]) is None
    assert match_position([5, 5]) == 1


def test_lookup_neither_matches_across_visual_tokens_nor_copies_them() -> None:
    assert match_position([5, NO_TOKEN, NO_TOKEN, 5]) is None, "a visual column follows the only match"
    assert match_position([NO_TOKEN, 6, 7, NO_TOKEN, 6]) == 2
    assert match_position([NO_TOKEN, 6, 7, NO_TOKEN, 6], least=2) is None, (
        "visual columns equal nothing, not even each other"
    )


def admitted(prompts: list[list[int]], visual: list[list[bool]] | None = None) -> tuple[LookupDrafter, SlotBatch]:
    """A drafter whose slots hold the prompts; the last token of each is the target's first."""
    drafter = LookupDrafter()
    drafter.open(blocks.spec())
    slots = blocks.slots(*range(len(prompts)))
    prefill_outputs = []
    for row, tokens in enumerate(prompts):
        prefix = blocks.prefill_output(torch.zeros(0, 4)).prefix
        marks = visual[row] if visual else [False] * (len(tokens) - 1)
        prefill_outputs.append(
            blocks.PrefillOutput(replace(prefix, token_ids=torch.tensor(tokens[:-1]), visual=torch.tensor(marks),
                                 embeds=torch.zeros(len(tokens) - 1, 4), positions=torch.arange(len(tokens) - 1)))
        )  # fmt: skip
    drafter.admit(slots, torch.tensor([tokens[-1] for tokens in prompts]), prefill_outputs)
    return drafter, slots


def drafted(drafter: Drafter, policy: TreePolicy, slots: SlotBatch, root: Tensor, num_levels: int) -> DraftTree:
    like = blocks.verification(DraftTree.root_only(root), torch.zeros(len(root), 1, blocks.VOCAB_SIZE), where=slots)
    frontier: Frontier | None = policy.start(slots, root, num_levels, True)
    while frontier is not None:
        frontier = policy.grow(DraftLogits(drafter.draft(slots, frontier), None, like.rows))
    return policy.finish()


@pytest.mark.parametrize("shape", ["chain", "sage"])
def test_a_copy_runs_on_past_the_texts_end_and_a_row_without_a_match_drafts_nothing(shape: str) -> None:
    drafter, slots = admitted([[5, 6, 7, 8, 5, 6], [5, 6, 7, 8], [9, 9, 9]])
    policy: TreePolicy = Chain(5) if shape == "chain" else SageTree()
    policy.open(blocks.spec())
    policy.reset(slots)
    tree = drafted(drafter, policy, slots, torch.tensor([6, 8, 9]), 5)
    assert lines(tree, 0) == {(7, 8, 5, 6, 7)[:depth] for depth in range(1, 6)}
    assert lines(tree, 1) == set()
    assert lines(tree, 2) == {(9,) * depth for depth in range(1, 6)}
    assert tree.draft_probs is not None
    assert not tree.draft_probs.isnan().any()
    assert tree.draft_probs[0, 0, 7] == 1.0, "a copied token is certain"


def test_accepted_tokens_are_searched_from_the_next_step_on() -> None:
    drafter, slots = admitted([[5, 6, 7, 8, 5, 6], [5, 6, 7, 8]])
    policy = Chain(3)
    tree = drafted(drafter, policy, slots, torch.tensor([6, 8]), 3)
    # Row 0 takes 7 and 8 and then goes to 30; row 1 had no drafts and goes to 6.
    wanted = blocks.wanting([7, 8, 30, 0], [6, 0, 0, 0])
    verification = blocks.verification(tree, wanted, where=slots)
    drafter.commit(verification, Exact().accept(verification))
    assert drafter._text[0, :10].tolist() == [5, 6, 7, 8, 5, 6, 7, 8, 30, NO_TOKEN]
    assert drafter._text[1, :6].tolist() == [5, 6, 7, 8, 6, NO_TOKEN]
    again = drafted(drafter, policy, slots, torch.tensor([30, 6]), 3)
    assert lines(again, 0) == set()
    assert lines(again, 1) == {(7,), (7, 8), (7, 8, 6)}
    assert drafter.extras(0) == {"lookup_match_rate": 0.5, "lookup_match_tokens_mean": 2.0}
    assert drafter.extras(1) == {"lookup_match_rate": 0.5, "lookup_match_tokens_mean": 1.0}


def test_visual_tokens_of_a_prompt_are_never_copied() -> None:
    drafter, slots = admitted([[5, 3, 3, 6, 5]], [[False, True, True, False]])
    assert drafter._text[0, :6].tolist() == [5, NO_TOKEN, NO_TOKEN, 6, 5, NO_TOKEN]
    assert lines(drafted(drafter, Chain(3), slots, torch.tensor([5]), 3), 0) == set()


# --- nothing asks the device -----------------------------------------------------------------------------------------
