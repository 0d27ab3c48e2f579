"""Rejection over picked drafts: whatever was picked, each verified token has the target's own distribution."""

from __future__ import annotations

import torch

from decoding.acceptance import Rejection
from decoding.contracts import StepNoise, VerificationOutput
from decoding.noise import Noise
from decoding.sampling import RowSampling
from decoding.tree import DraftTree
from models.kv.lanes import SlotBatch

NUM_ROWS, VOCAB = 20_000, 4
TOKENS = [0, 1, 3, 2, 0]
PARENTS = [-1, 0, 0, 1, 1]
"""The root's children are 1 and 3; the children of 1 are 2 and 0."""
AFTER = {0: [0.1, 0.2, 0.3, 0.4], 1: [0.5, 0.25, 0.15, 0.1], 2: [0.7, 0.1, 0.1, 0.1], 3: [0.25] * 4, 4: [0.25] * 4}


def spread(values: list[int] | list[bool]) -> torch.Tensor:
    return torch.tensor(values).expand(NUM_ROWS, -1)


def chi_square(counts: torch.Tensor, probs: list[float]) -> float:
    expected = torch.tensor(probs, dtype=torch.float64) * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_two_levels_of_deterministic_drafts_are_verified_without_bias() -> None:
    """With three degrees of freedom the right distribution stays under 16.3 but once in a thousand."""
    tree = DraftTree(
        tokens=spread(TOKENS),
        parents=spread(PARENTS),
        depth=spread([0, 1, 1, 2, 2]),
        valid=spread([True] * 5),
        origin=spread([0, 1, 2, 3, 4]),
        num_levels=2,
        max_siblings=2,
    )
    logits = torch.tensor([AFTER[node] for node in range(5)]).log().expand(NUM_ROWS, -1, -1)
    index, ones = torch.arange(NUM_ROWS), torch.ones(NUM_ROWS)
    rows = RowSampling(ones, index * 0, ones, ones, None, True, 0, False)
    noise = StepNoise(Noise(torch.stack([index, index + 7], 1), index * 0), 3, VOCAB)
    slots = SlotBatch(index, tuple(range(NUM_ROWS)), (1,) * NUM_ROWS)
    hidden = torch.zeros(NUM_ROWS, 1, 5, 1)
    result = Rejection().accept(VerificationOutput(slots, tree, logits, logits, hidden, hidden, noise, rows))
    path = tree.tokens.gather(1, result.path)
    first = torch.where(result.n > 1, path[:, 1], result.next)
    second = torch.where(result.n > 2, path[:, 2], result.next)
    assert chi_square(torch.bincount(first, minlength=VOCAB), AFTER[0]) < 16.3
    for node, token in ((1, 1), (2, 3)):
        below = second[(result.path[:, 1] == node) & (result.n > 1)]
        assert chi_square(torch.bincount(below, minlength=VOCAB), AFTER[node]) < 16.3
        # What is accepted is what the target gives a picked token: all of its mass, not a share of it.
        share = float((result.path[:, 1] == node).double().mean())
        assert abs(share - AFTER[0][token]) < 0.015
