"""Walking the longest accepted path: lengths, ties, padding, rows of different shapes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.acceptance.walk import Branches, walk_accepted, walk_choices
from decoding.tree import AcceptanceResult, DraftTree
from tests.decoding import blocks

#            0
#       1         2
#     3   4       5
#     6
FORK = [-1, 0, 0, 1, 1, 2, 3]


def accept_all(drafts: DraftTree, choice: torch.Tensor) -> AcceptanceResult:
    accept = torch.ones_like(drafts.valid)[:, None]
    return walk_accepted(drafts, Branches.of(drafts), choice, accept)


def test_branches_are_the_paths_to_the_leaves() -> None:
    branches = Branches.of(blocks.tree([[39, 4, 5, 6, 7, 8, 9]], FORK))
    assert branches.is_whole.tolist() == [[False, False, False, False, True, True, True]]
    assert branches.member[0, 4].nonzero().flatten().tolist() == [1, 4]
    assert branches.member[0, 5].nonzero().flatten().tolist() == [2, 5]
    assert branches.member[0, 6].nonzero().flatten().tolist() == [1, 3, 6]
    assert branches.length[0, 4:].tolist() == [2, 2, 3]


def test_an_invalid_leaf_shortens_its_branch() -> None:
    drafts = blocks.tree([[39, 4, 5, 6, 7, 8, 9]], FORK, [[True] * 6 + [False]])
    branches = Branches.of(drafts)
    assert branches.is_whole.tolist() == [[False, False, False, True, True, True, False]]
    assert branches.member[0, 3].nonzero().flatten().tolist() == [1, 3]


def test_the_longest_accepted_branch_wins_and_the_targets_own_token_follows_it() -> None:
    choice = torch.tensor([[5, 20, 21, 22, 23, 24, 25]])
    result = accept_all(blocks.tree([[39, 4, 5, 6, 7, 8, 9]], FORK), choice)
    assert result.path.tolist() == [[0, 1, 3, 6]]
    assert result.n.tolist() == [4]
    assert result.next.tolist() == [25]
    assert result.relaxed.tolist() == [[False, True, True, True]]


def test_of_equally_long_paths_the_one_with_more_of_the_targets_own_choices_wins() -> None:
    # Branches {1, 3}, {1, 4} and {2, 5}: the target wants 5 (node 2) first, and 8 (node 5) after it.
    drafts = blocks.tree([[39, 4, 5, 6, 7, 8]], FORK[:6])
    result = accept_all(drafts, torch.tensor([[5, 20, 8, 22, 23, 24]]))
    assert result.path.tolist() == [[0, 2, 5]]
    assert result.relaxed.tolist() == [[False, False, False]]
    first = accept_all(drafts, torch.tensor([[30, 20, 21, 22, 23, 24]]))
    assert first.path.tolist() == [[0, 1, 3]], "what still ties goes to the branch whose last node comes first"


def test_merit_decides_between_equally_long_paths() -> None:
    drafts = blocks.tree([[39, 4, 5, 6, 7, 8]], FORK[:6])
    choice = torch.tensor([[30, 20, 21, 22, 23, 24]])
    merit = torch.tensor([[0.0, -1.0, -5.0, -3.0, -2.0, -0.5]])
    result = walk_accepted(drafts, Branches.of(drafts), choice, torch.ones_like(drafts.valid)[:, None], merit)
    assert result.path.tolist() == [[0, 1, 4]], "−1 − 2 beats −1 − 3 and −5 − 0.5"


def test_accepting_exact_matches_only_is_the_walk_along_the_targets_choices() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        num_nodes = 8
        parents = [-1, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, num_nodes))]
        tokens = [[39] * num_nodes, [39] * num_nodes]
        for row in tokens:
            for node in range(1, num_nodes):  # siblings differ: tokens 4, 5, … in order of rank, shuffled by a shift
                rank = sum(parents[i] == parents[node] for i in range(1, node))
                row[node] = 4 + (rank + int(torch.randint(0, 2, (1,), generator=generator)) * 8)
        drafts = blocks.tree(tokens, parents)
        choice = torch.randint(4, 7, (2, num_nodes), generator=generator)
        match = drafts.tokens == choice.gather(1, drafts.parents.clamp_min(0))
        mine = walk_accepted(drafts, Branches.of(drafts), choice, match[:, None])
        theirs = walk_choices(drafts, choice)
        assert mine.n.tolist() == theirs.n.tolist()
        assert mine.path.tolist() == theirs.path.tolist()
        assert mine.next.tolist() == theirs.next.tolist()
        assert not mine.relaxed.any()


def walk_by_hand(drafts: DraftTree, choice: torch.Tensor, row: int) -> tuple[list[int], int]:
    """Step by step to the first valid child that is the target's choice; the path, and the token after it."""
    path = [0]
    while True:
        wanted = int(choice[row, path[-1]])
        children = [
            node
            for node in range(1, drafts.num_nodes)
            if int(drafts.parents[row, node]) == path[-1]
            and bool(drafts.valid[row, node])
            and int(drafts.tokens[row, node]) == wanted
        ]
        if not children:
            return path, wanted
        path.append(children[0])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_walk_takes_the_first_child_that_is_the_targets_choice(data: st.DataObject) -> None:
    num_nodes = data.draw(st.integers(1, 9))
    is_line = data.draw(st.booleans())
    parents = [-1, *(i - 1 if is_line else data.draw(st.integers(0, i - 1)) for i in range(1, num_nodes))]
    # Few tokens, so that siblings may be equal, and a twin may lead on where the first does not.
    row = st.lists(st.integers(4, 6), min_size=num_nodes, max_size=num_nodes)
    valid = data.draw(st.lists(st.booleans(), min_size=2 * num_nodes, max_size=2 * num_nodes))
    valid[0] = valid[num_nodes] = True
    if is_line:  # whose invalid nodes are its tail
        cut = data.draw(st.integers(1, num_nodes))
        valid = [index % num_nodes < cut for index in range(2 * num_nodes)]
    drafts = blocks.tree([data.draw(row), data.draw(row)], parents, [valid[:num_nodes], valid[num_nodes:]])
    choice = torch.tensor([data.draw(row), data.draw(row)])
    result = walk_choices(drafts, choice)
    for number in range(2):
        path, own = walk_by_hand(drafts, choice, number)
        assert result.n[number] == len(path)
        assert result.path[number].tolist() == path + [0] * (drafts.num_levels + 1 - len(path))
        assert result.next[number] == own
    assert not result.relaxed.any()


def test_of_siblings_with_equal_tokens_the_first_is_followed() -> None:
    drafts = blocks.tree([[39, 4, 4, 5]], [-1, 0, 0, 2])
    result = walk_choices(drafts, torch.tensor([[4, 7, 5, 8]]))
    assert (result.path.tolist(), result.n.tolist(), result.next.tolist()) == ([[0, 1, 0]], [2], [7])
