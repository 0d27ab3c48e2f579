"""Collects all grown nodes in a pool and selects the best of them for verification.

A node's priority is at most its parent's, sorts are stable and the pool is in level order, so parents are kept too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.tree import DraftTree


class NodePool:
    """Nodes grown under the root token `root` (b,), level by level; entry i of the pool is the grown node i + 1."""

    def __init__(self, root: Tensor) -> None:
        self._root = root
        self._levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.size = 0

    def add(self, tokens: Tensor, parents: Tensor, priority: Tensor) -> int:
        """Add a level (b, M) and return the pool index of its first node. `parents` are pool indices, −1 for the root;
        nodes with priority −inf or NaN do not exist."""
        first, depth = self.size, len(self._levels) + 1
        self._levels.append((tokens, parents, priority, torch.full_like(tokens, depth)))
        self.size += tokens.shape[1]
        return first

    def tree(self, budget: int, max_siblings: int) -> DraftTree:
        """Return the trees of the root and the best `budget` nodes, padded."""
        tokens, parents, priority, depth = (torch.cat(values, dim=1) for values in zip(*self._levels, strict=True))
        pool_index, valid, parents = keep_best(priority, parents, budget)
        return DraftTree(
            tokens=torch.cat([self._root[:, None], tokens.gather(1, pool_index)], dim=1),
            parents=with_root(parents, -1),
            depth=with_root(torch.where(valid, depth.gather(1, pool_index), 0), 0),
            valid=with_root(valid, True),
            origin=with_root(torch.where(valid, pool_index + 1, 0), 0),
            num_levels=len(self._levels),
            max_siblings=max_siblings,
        )


def best_of(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of `values` (b, M) and their indices; ties are in index order.

    Uses a full stable sort, because top-k breaks ties arbitrarily.
    """
    ordered, index = values.sort(dim=1, descending=True, stable=True)
    return ordered[:, :count], index[:, :count]


def keep_best(first: Tensor, parent: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the best `budget` nodes of a pool with priorities `first` and parent indices `parent` (b, M). Return, all
    (b, budget): kept pool indices in pool order, a mask of those that exist, and their parents' tree indices or −1."""
    num_pooled = first.shape[1]
    values, index = best_of(first, budget)
    if values.shape[1] < budget:
        spare = (0, budget - values.shape[1])
        values = torch.nn.functional.pad(values, spare, value=-torch.inf)
        index = torch.nn.functional.pad(index, spare)
    pool_index = torch.where(values > -torch.inf, index, num_pooled).sort(dim=1).values
    valid = pool_index < num_pooled
    tree_index = torch.arange(1, budget + 1, device=first.device).expand_as(pool_index)
    # Maps pool index + 1 to tree index; entry 0 is the root, the last entry is written by padding.
    node_of = torch.zeros_like(pool_index[:, :1]).expand(-1, num_pooled + 2).scatter(1, pool_index + 1, tree_index)
    pool_index = pool_index.clamp_max(num_pooled - 1)
    parents = node_of.gather(1, parent.gather(1, pool_index) + 1)
    return pool_index, valid, torch.where(valid, parents, -1)


def with_root(values: Tensor, root: int) -> Tensor:
    """Prepend the value of the root to the nodes' `values` (b, N − 1)."""
    return torch.nn.functional.pad(values, (1, 0), value=root)
