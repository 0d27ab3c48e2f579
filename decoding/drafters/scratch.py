"""Assigns the nodes that a drafter runs in one step to scratch positions of a KV cache, and builds their masks."""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.contracts import EngineSpec
from decoding.tree import Frontier


class ScratchNodes:
    """Scratch positions of the nodes of one step, in the order in which they are run.

    With `has_root`, position 0 holds the root and the first frontier contains it; otherwise the root is committed and
    the first frontier has depth 1. `capacity` is the number of scratch positions. State per step: `_levels`, the nodes
    that were run; and `_sees` (b, G, M), the positions that each of G grown nodes attends to, None for chains.
    """

    def __init__(self, spec: EngineSpec, device: torch.device, has_root: bool) -> None:
        self.capacity = spec.max_frontier_nodes + has_root
        self.num_nodes = 0
        self._num_roots = int(has_root)
        self._max_grown = spec.max_grown_nodes
        self._numbers = torch.arange(self.capacity, device=device)
        self._itself = torch.eye(self.capacity, dtype=torch.bool, device=device)
        # Row n marks the first n scratch positions.
        self._first = torch.ones(self.capacity + 1, self.capacity, dtype=torch.bool, device=device).tril(-1)
        # Cached views by rows and scratch position, because each operation between two forwards takes time.
        self._continuations: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.clear()

    def clear(self) -> None:
        """Start a step without nodes."""
        self.num_nodes = 0
        self._levels: list[Tensor] = []
        self._sees: Tensor | None = None

    def place(self, frontier: Frontier) -> tuple[Tensor, Tensor, int]:
        """Place the frontier behind the earlier nodes of the step.

        Returns the depths (b, F) from the row's next position, the mask (b, F, M) of the positions that each node
        attends to, its ancestors and itself, and the first position.
        """
        b, width = frontier.nodes.shape
        start = self.num_nodes
        above_root = 1 - self._num_roots
        # While every level has one node, each node attends to all earlier nodes, and parents are not needed.
        is_line = start == frontier.depth - above_root
        self._levels.append(frontier.nodes)
        self.num_nodes += width
        if is_line and width == 1:
            return *self._chain_continuation(b, start), start
        if self._sees is None:
            shape = (b, self._max_grown, self.capacity)
            self._sees = torch.zeros(shape, dtype=torch.bool, device=frontier.nodes.device)
        if is_line:
            above = self._first[start].expand(b, width, -1)
        else:
            above = self._sees.gather(1, frontier.parents[:, :, None].expand(-1, -1, self.capacity))
        sees = above | self._itself[start : start + width]
        self._sees.scatter_(1, frontier.nodes[:, :, None].expand(-1, -1, self.capacity), sees)
        return torch.full_like(frontier.tokens, frontier.depth - above_root), sees[:, :, : start + width], start

    def _chain_continuation(self, b: int, position: int) -> tuple[Tensor, Tensor]:
        """Return depth (b, 1) and mask (b, 1, position + 1) of a chain's node in scratch position `position`."""
        if (b, position) not in self._continuations:
            sees = self._first[position + 1, : position + 1].expand(b, 1, -1)
            self._continuations[b, position] = self._numbers[position].expand(b, 1), sees
        return self._continuations[b, position]

    def columns_of(self, grown: Tensor) -> Tensor:
        """Return the scratch positions (b, D) of `grown` nodes (b, D); −1 for nodes that were not run."""
        columns = grown.new_full((grown.shape[0], self._max_grown), -1)
        if self._levels:
            nodes = torch.cat(self._levels, dim=1)
            columns.scatter_(1, nodes, self._numbers[: nodes.shape[1]].expand_as(nodes))
        return columns.gather(1, grown)
