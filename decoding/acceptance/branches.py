"""Root-to-leaf branches of trees, for rules that judge a branch as a block.

A chain has one branch. Rows may have trees of different shapes; branches are computed from the parents on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.tree import DraftTree


@dataclass(frozen=True)
class Branches:
    """The branch that ends at each node: `member` (b, L, N) the drafts of branch ℓ without the root; `length` (b, L)
    their number; `is_whole` (b, L) whether node ℓ is a leaf, so that the branch is a whole block. L = N: branches are
    numbered by their last node.

    Example: a root with the chain 1 → 2 and the leaf 3 has the whole branches {1, 2} (number 2) and {3} (number 3).
    """

    member: Tensor
    length: Tensor
    is_whole: Tensor

    @staticmethod
    def of(tree: DraftTree) -> Branches:
        """The branches of valid nodes; where nothing was drafted, the root's empty branch is the only one."""
        drafts = tree.valid & (tree.depth > 0)
        numbers = torch.arange(tree.num_nodes, device=tree.tokens.device)
        has_child = ((tree.parents[:, None, :] == numbers[None, :, None]) & tree.valid[:, None]).any(dim=-1)
        return Branches(tree.visible() & drafts[:, None], tree.depth, tree.valid & ~has_child)

    def count(self, nodes: Tensor, marks: Tensor) -> Tensor:
        """For branch ℓ and node i, how many j on the branch have `nodes` (b, N) and, at (j, i), `marks` (b, N, N)."""
        # Counts are far below 2²⁴, so fp32 holds them exactly.
        return (self.member & nodes[:, None]).float() @ marks.float()
