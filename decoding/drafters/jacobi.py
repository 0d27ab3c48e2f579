"""Speculative Jacobi decoding: the drafts of a step are the target's own choices in the step before; no drafter model.

A verify forward yields the target's choice after every node of the chain, also after nodes that are not accepted. Each
choice is the draft of its position in the next step: argmax(log p_old + g), with the noise g of the position, which is
the same in all steps (speculative Jacobi decoding: Teng et al. 2024, arXiv 2410.01699; the shared noise is the Gumbel
coupling of arXiv 2510.24211). A chain whose drafts equal the choices is a fixed point, and all of it is accepted.

Example with a chain of 4 behind the pending token t:

    nodes     t  a  b  c  d
    choices      a  x  y  z  w     the target's tokens at the positions of a … d, and of the position after d
    accepted     a  x              x is the new pending token
    drafts             y  z  w  ·  of the next step; the last position is filled
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from decoding.acceptance.walk import target_choice
from decoding.contracts import Drafter, EngineSpec, PrefillOutput, VerificationOutput
from decoding.drafters.line import follow_line
from decoding.tree import AcceptanceResult, Frontier
from models.kv.lanes import SlotBatch


class JacobiDrafter(Drafter):
    """Drafter that proposes the target's previous choices along a chain.

    Positions that no forward has reached are filled: with the last known token, or if `grid` is set, with the code one
    image row of `grid` codes above. In the first step of a sample, every position is filled.

    State per slot: `_output` (S, L) are the generated tokens, followed by the drafts of the next step; `_length` (S,)
    is the number of generated tokens.
    """

    name = "jacobi"

    def __init__(self, grid: int | None = None) -> None:
        assert grid is None or grid >= 1, grid
        self.grid = grid

    def open(self, spec: EngineSpec) -> None:
        self._vocab_size = spec.vocab_size
        self._window = spec.max_levels
        # A step writes its choices behind the text, and the next drafts behind the accepted ones.
        capacity = spec.max_context_tokens + 2 * spec.max_levels + 2
        self._output = torch.zeros(spec.num_slots, capacity, dtype=torch.long, device=spec.device)
        self._length = torch.zeros(spec.num_slots, dtype=torch.long, device=spec.device)

    def admit(self, slots: SlotBatch, first: Tensor, prefill_outputs: Sequence[PrefillOutput]) -> None:
        self._output[slots.index, 0] = first
        self._length[slots.index] = 1
        self._fill(slots, self._length[slots.index], self._length[slots.index])

    def replay_key(self, slots: SlotBatch, num_levels: int) -> Hashable | None:
        return ()

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        if frontier.depth == 0:
            self._line = self._output[slots.index].gather(1, self._positions(self._length[slots.index]))
        return follow_line(frontier, self._line, self._vocab_size)

    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> None:
        tree, slots = verification.tree, verification.slots
        assert tree.is_chain, "the choices of a step are the next drafts only along a chain"
        length, num_nodes = self._length[slots.index], tree.num_nodes
        depth = torch.arange(num_nodes, device=length.device)
        # Relaxed rules may accept other tokens than the choices.
        tokens = torch.where(depth < result.n[:, None], result.produced(tree), target_choice(verification))
        self._output[slots.index[:, None], length[:, None] + depth] = tokens
        # A step of fewer levels, or without drafts, leaves the older drafts behind its own choices.
        known = length + max(num_nodes, self._window)
        slots.add(self._length, result.n)
        self._fill(slots, length + result.n, known)

    def _fill(self, slots: SlotBatch, length: Tensor, known: Tensor) -> None:
        """Write the drafts from `length` (b,) on; positions from `known` (b,) on are filled."""
        positions = self._positions(length)
        source = torch.minimum(positions, known[:, None] - 1)
        if self.grid is not None:
            # The nearest row above that is known; the first row of an image has none.
            num_rows = (positions - source + self.grid - 1) // self.grid
            above = positions - num_rows * self.grid
            source = torch.where(above >= 0, above, source)
        self._output[slots.index[:, None], positions] = self._output[slots.index].gather(1, source)

    def _positions(self, length: Tensor) -> Tensor:
        """Return the indices (b, W) of the drafts behind `length` (b,) tokens."""
        return length[:, None] + torch.arange(self._window, device=length.device)
