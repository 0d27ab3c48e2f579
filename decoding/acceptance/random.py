"""Random relaxation: accepts a mismatch with a fixed probability; the control of informed rules."""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.acceptance.relaxed import Mismatches, RelaxedRule
from decoding.contracts import Judgement
from decoding.noise import Stream


class RandomRelaxation(RelaxedRule):
    """Relax a mismatch with `probability`; siblings have a draw each, keyed by position and rank."""

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def pardon(self, judgement: Judgement, seen: Mismatches) -> Tensor:
        tree = judgement.tree
        draws = torch.stack(
            [judgement.noise.uniform(Stream.RULE, sibling) for sibling in range(tree.max_siblings)], dim=-1
        )  # (b, depths, siblings)
        place = (tree.depth - 1).clamp_min(0) * tree.max_siblings + tree.sibling_rank()
        # The root's rank is 0 as well, but it is not read.
        return (draws.flatten(1).gather(1, place) < self.probability)[:, None]
