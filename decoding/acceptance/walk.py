"""Computes the target's token after each node, the branches of trees, and accepted paths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.contracts import VerificationOutput
from decoding.noise import Stream
from decoding.sampling import perturb
from decoding.tree import AcceptanceResult, DraftTree


def target_choice(verification: VerificationOutput) -> Tensor:
    """Return the target's token (b, N) after each node: the argmax, or on sampled rows its shared-noise sample.

    It is computed once for each verification.
    """
    if not verification.choices:
        tree, noise = verification.tree, None
        if verification.rows.any_sampled:
            draws = verification.noise.gumbel(Stream.TOKEN)
            noise = draws.gather(1, tree.depth[:, :, None].expand(-1, -1, draws.shape[-1]))
        verification.choices.append(perturb(verification.processed_logits, noise, verification.rows).argmax(dim=-1))
    return verification.choices[0]


@dataclass(frozen=True)
class Branches:
    """One branch per node (L = N), from the root to the node: `member` (b, L, N) marks its drafts, without the root,
    `length` (b, L) is their number, and `is_whole` (b, L) marks branches that end at a leaf.

    Example: a root with the chain 1 → 2 and the leaf 3 has the whole branches {1, 2} (index 2) and {3} (index 3).
    """

    member: Tensor
    length: Tensor
    is_whole: Tensor

    @staticmethod
    def of(tree: DraftTree) -> Branches:
        """Return the branches of the valid nodes; without drafts, only the root's empty branch."""
        drafts = tree.valid & (tree.depth > 0)
        numbers = torch.arange(tree.num_nodes, device=tree.tokens.device)
        has_child = ((tree.parents[:, None, :] == numbers[None, :, None]) & tree.valid[:, None]).any(dim=-1)
        return Branches(tree.visible() & drafts[:, None], tree.depth, tree.valid & ~has_child)

    def count(self, nodes: Tensor, marks: Tensor) -> Tensor:
        """Count (b, L, N) for branch ℓ and node i the nodes j of ℓ in `nodes` (b, N) with `marks[j, i]` (b, N, N)."""
        # Counts are far below 2²⁴, so fp32 holds them exactly.
        return (self.member & nodes[:, None]).float() @ marks.float()


def walk_choices(tree: DraftTree, choice: Tensor) -> AcceptanceResult:
    """Accept the drafts on the path that follows `choice` (b, N), the target's token after each node."""
    if tree.is_chain:
        return _walk_line(tree, choice)
    match = (tree.tokens == wanted_tokens(tree, choice)) & tree.valid
    match[:, 0].fill_(True)
    if tree.max_siblings > 1:
        # If siblings have equal tokens, take the first.
        twins = (tree.parents[:, :, None] == tree.parents[:, None]) & match[:, None]
        match = match & ~twins.tril(-1).any(dim=2)
    taken = ~(tree.visible() & ~match[:, None]).any(dim=2)
    num_levels = tree.num_levels
    numbers = torch.arange(tree.num_nodes, device=choice.device).expand_as(tree.tokens)
    # Nodes that are not taken are written to one index after the end of the path.
    indices = torch.where(taken, tree.depth, num_levels + 1)
    path = torch.zeros_like(tree.tokens[:, :1]).repeat(1, num_levels + 2).scatter_(1, indices, numbers)[:, :-1]
    n = taken.sum(dim=1)
    last = choice.gather(1, path.gather(1, (n - 1)[:, None]))[:, 0]
    return AcceptanceResult(path, n, last, torch.zeros_like(path, dtype=torch.bool))


def _walk_line(tree: DraftTree, choice: Tensor) -> AcceptanceResult:
    """Compute `walk_choices` for a chain."""
    match = (tree.tokens[:, 1:] == choice[:, :-1]) & tree.valid[:, 1:]
    num_taken = match.cumprod(dim=1).sum(dim=1, keepdim=True)
    # In a chain, node indices equal depths.
    path = torch.where(tree.depth <= num_taken, tree.depth, 0)
    last = choice.gather(1, num_taken)[:, 0]
    return AcceptanceResult(path, num_taken[:, 0] + 1, last, torch.zeros_like(path, dtype=torch.bool))


def wanted_tokens(tree: DraftTree, choice: Tensor) -> Tensor:
    """Return the target's token (b, N) at the position of each draft; undefined at the root."""
    return choice.gather(1, tree.parents.clamp_min(0))


def walk_accepted(
    tree: DraftTree, branches: Branches, choice: Tensor, accept: Tensor, merit: Tensor | None = None
) -> AcceptanceResult:
    """Accept the longest acceptable prefix of any branch; `choice` (b, N) is the target's token after each node.

    `accept` (b, 1, N), or (b, L, N) if it depends on the branch, marks acceptable drafts. Of equally long prefixes the
    prefix with the larger sum of `merit` (b, N) wins; the default merit is 1 for matches with the target. Remaining
    ties go to the branch with the smaller index of its last node.
    """
    match = tree.tokens == wanted_tokens(tree, choice)
    refused = branches.member & ~accept
    first_refused = torch.where(refused, tree.depth[:, None], tree.num_levels + 1).amin(dim=-1)
    length = torch.minimum(first_refused - 1, branches.length)
    longest = torch.where(branches.is_whole, length, -1).amax(dim=1)
    prefix = branches.member & (tree.depth[:, None] <= length[:, :, None])
    worth = (prefix * (match.float() if merit is None else merit)[:, None]).sum(dim=-1)
    best = branches.is_whole & (length == longest[:, None])
    winner = torch.where(best, worth, -torch.inf).argmax(dim=1)
    taken = prefix.gather(1, winner[:, None, None].expand(-1, 1, tree.num_nodes))  # (b, 1, N)
    levels = torch.arange(tree.num_levels + 1, device=choice.device)[None, :, None]
    path = (taken & (tree.depth[:, None] == levels)).long().argmax(dim=-1)  # the root if nothing is taken
    last = path.gather(1, longest[:, None])
    relaxed = (levels[..., 0] > 0) & (levels[..., 0] <= longest[:, None]) & ~match.gather(1, path)
    return AcceptanceResult(path, longest + 1, choice.gather(1, last)[:, 0], relaxed)
