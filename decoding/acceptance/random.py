"""Random relaxation: accepts a mismatch with a fixed probability; a baseline for the other relaxed rules."""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.acceptance.relaxed import Mismatches, RelaxedRule
from decoding.contracts import VerificationOutput
from decoding.noise import Stream


class RandomRelaxation(RelaxedRule):
    """Rule that relaxes each mismatch with `probability`, by a uniform number per output position and sibling rank."""

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def pardon(self, verification: VerificationOutput, mismatches: Mismatches) -> Tensor:
        tree = verification.tree
        draws = torch.stack(
            [verification.noise.uniform(Stream.RULE, sibling) for sibling in range(tree.max_siblings)], dim=-1
        )  # (b, depths, siblings)
        index = (tree.depth - 1).clamp_min(0) * tree.max_siblings + tree.sibling_rank()
        # The root also maps to an entry, but its result is not used.
        return (draws.flatten(1).gather(1, index) < self.probability)[:, None]
