"""Masks the target's logits with the grammars of requests, and computes the masks of draft trees on the host.

The mask of a node is that of the grammar's state after the output and the drafts from the root to the node. It is
applied to the target's logits before penalties, temperature and filters, as a logits processor of transformers is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from decoding.grammar import NO_TOKEN, Matcher
from decoding.tree import DraftTree
from models.kv.lanes import SlotBatch

Drafts = tuple[list[list[int]], list[list[int]]]
"""Tokens and parents (b, N) of draft trees on the host; invalid nodes have the parent −1."""


class Constraints:
    """Masks of S slots; `matchers[slot]` is the state of the slot's grammar, None without one."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.matchers: list[Matcher | None] = [None] * num_slots
        self._vocab_size = vocab_size
        self._device = device
        self._bits = torch.arange(8, dtype=torch.uint8, device=device)

    def applies(self, ids: Sequence[int]) -> bool:
        """Return whether any of the slots `ids` has a grammar."""
        return any(self.matchers[slot] is not None for slot in ids)

    def read(self, slots: SlotBatch, tree: DraftTree) -> Drafts | None:
        """Copy the drafts to the host; None if no slot has a grammar. Waits until the trees are drafted."""
        if not self.applies(slots.ids):
            return None
        parents = torch.where(tree.valid, tree.parents, -1)
        tokens, above = torch.stack([tree.tokens, parents]).tolist()
        return tokens, above

    def apply(self, slots: SlotBatch, logits: Tensor, drafts: Drafts | None = None) -> Tensor:
        """Return logits (b, N, V) with −inf for tokens that the grammar forbids after each node of the trees.

        Without `drafts`, N is 1. Logits after forbidden drafts are unchanged; no rule accepts these drafts. The host
        computes masks while the device computes the logits.
        """
        if not self.applies(slots.ids):
            return logits
        masks = self._ones(*logits.shape[:2])
        for row, slot in enumerate(slots.ids):
            if (matcher := self.matchers[slot]) is not None:
                tokens, parents = ([NO_TOKEN], [NO_TOKEN]) if drafts is None else (drafts[0][row], drafts[1][row])
                matcher.fill(masks[row], tokens, parents)
        return logits.masked_fill(~self._unpack(masks), -torch.inf)

    def look(self, slots: SlotBatch, paths: Sequence[Sequence[Sequence[int]]]) -> tuple[Tensor, Tensor]:
        """Return the forced token (b, F), `NO_TOKEN` without one, after each of `paths` (b, F, depth) of drafts, and
        the mask (b, F, V) of allowed tokens; all tokens after paths that are not legal."""
        masks = self._ones(len(paths), len(paths[0]))
        forced = [[NO_TOKEN] * len(paths[0]) for _ in paths]
        for row, slot in enumerate(slots.ids):
            if (matcher := self.matchers[slot]) is not None:
                forced[row] = [matcher.look(path, masks[row, index]) for index, path in enumerate(paths[row])]
        return torch.tensor(forced, device=self._device), self._unpack(masks)

    def _ones(self, num_rows: int, num_nodes: int) -> np.ndarray:
        return np.full((num_rows, num_nodes, -(-self._vocab_size // 32) * 4), 255, dtype=np.uint8)

    def _unpack(self, masks: np.ndarray) -> Tensor:
        """Convert masks (b, N, bytes) to a boolean tensor (b, N, V) on the device."""
        bits = torch.from_numpy(masks).to(self._device)[..., None] >> self._bits & 1
        return bits.flatten(-2)[..., : self._vocab_size].bool()
