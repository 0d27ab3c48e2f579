"""Walking down a tree while the target's own choice is among the drafts. Knows no probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

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
