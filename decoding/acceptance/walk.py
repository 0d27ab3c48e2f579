"""Walking down a tree: along the target's own choices, or along the longest path that a rule accepts.

Knows no probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.acceptance.branches import Branches
from decoding.tree import DraftTree, Verdict


def walk_choices(tree: DraftTree, choice: Tensor) -> Verdict:
    """Follow `choice` (b, N), the token the target takes after each node, as far as the tree has it."""
    b = choice.shape[0]
    current = torch.zeros(b, 1, dtype=torch.long, device=choice.device)
    alive = torch.ones(b, dtype=torch.bool, device=choice.device)
    path = [current[:, 0]]
    n = torch.ones(b, dtype=torch.long, device=choice.device)
    for _ in range(tree.num_levels):
        wanted = choice.gather(1, current)
        hit = (tree.parents == current) & (tree.tokens == wanted) & tree.valid
        alive = alive & hit.any(dim=1)
        current = torch.where(alive[:, None], hit.long().argmax(dim=1, keepdim=True), current)
        path.append(torch.where(alive, current[:, 0], 0))
        n = n + alive
    nodes = torch.stack(path, dim=1)
    return Verdict(nodes, n, choice.gather(1, current)[:, 0], torch.zeros_like(nodes, dtype=torch.bool))


def wanted_tokens(tree: DraftTree, choice: Tensor) -> Tensor:
    """The token (b, N) that the target takes where each draft stands; meaningless at the root."""
    return choice.gather(1, tree.parents.clamp_min(0))


def walk_accepted(
    tree: DraftTree, branches: Branches, choice: Tensor, accept: Tensor, merit: Tensor | None = None
) -> Verdict:
    """Take the longest accepted prefix of any branch; `choice` (b, N) gives the token after it.

    `accept` (b, 1, N) says which drafts may be taken, or (b, L, N) where that depends on the branch. Of equally long
    prefixes the one with the larger sum of `merit` (b, N) wins; by default it counts the target's own choices. What
    still ties goes to the branch whose last node comes first.
    """
    match = tree.tokens == wanted_tokens(tree, choice)
    own = branches.member & ~accept
    first_refused = torch.where(own, tree.depth[:, None], tree.num_levels + 1).amin(dim=-1)
    length = torch.minimum(first_refused - 1, branches.length)
    longest = torch.where(branches.is_whole, length, -1).amax(dim=1)
    prefix = branches.member & (tree.depth[:, None] <= length[:, :, None])
    worth = (prefix * (match.float() if merit is None else merit)[:, None]).sum(dim=-1)
    best = branches.is_whole & (length == longest[:, None])
    winner = torch.where(best, worth, -torch.inf).argmax(dim=1)
    taken = prefix.gather(1, winner[:, None, None].expand(-1, 1, tree.num_nodes))  # (b, 1, N)
    levels = torch.arange(tree.num_levels + 1, device=choice.device)[None, :, None]
    path = (taken & (tree.depth[:, None] == levels)).long().argmax(dim=-1)  # the root where nothing is taken
    last = path.gather(1, longest[:, None])
    relaxed = (levels[..., 0] > 0) & (levels[..., 0] <= longest[:, None]) & ~match.gather(1, path)
    return Verdict(path, longest + 1, choice.gather(1, last)[:, 0], relaxed)
