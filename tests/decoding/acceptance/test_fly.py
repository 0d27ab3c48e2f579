"""Tests FLy on worked examples: the entropy gate, the deferred window, block ends, branches."""

from __future__ import annotations

import math

import pytest
import torch

from decoding.acceptance import Fly
from decoding.acceptance.fly import top_entropy
from tests.decoding import blocks

UNSURE = [0.5, 0.3, 0.15, 0.05]
"""Entropy over the top three, not renormalised: −(0.5 ln 0.5 + 0.3 ln 0.3 + 0.15 ln 0.15) = 0.9923 nats."""


def logits_of(wanted: list[int], unsure_at: set[int]) -> torch.Tensor:
    """After node i the target takes `wanted[i]`, surely or with probability 0.5 of UNSURE."""
    rows = torch.full((1, len(wanted), blocks.VOCAB_SIZE), -torch.inf)
    for node, token in enumerate(wanted):
        if node in unsure_at:
            others = [t for t in range(4, 9) if t != token][:3]
            for other, p in zip([token, *others], UNSURE, strict=True):
                rows[0, node, other] = math.log(p)
        else:
            rows[0, node, token] = 0.0
    return rows


def accepted(
    made: Fly, mismatches: set[int], unsure_at: set[int] | None = None, length: int = 8, drafts: list[int] | None = None
) -> int:
    """Return the number of a chain's drafts that pass if the drafts in `mismatches` (counted from 1) are mismatches."""
    made.open(blocks.spec())
    tokens = drafts or list(range(10, 10 + length))
    wanted = [30 if i in mismatches else tokens[i - 1] for i in range(1, length + 1)]
    # Draft i is judged by the distribution after node i − 1.
    unsure = set(range(length)) if unsure_at is None else {i - 1 for i in unsure_at}
    result = made.accept(blocks.verification(blocks.chain(tokens), logits_of([*wanted, 31], unsure)))
    return int(result.n) - 1


def test_the_gate_sums_the_three_largest_probabilities_as_they_are() -> None:
    logits = torch.tensor([UNSURE]).log() + 3.0  # a shift changes no probability
    expected = -sum(p * math.log(p) for p in UNSURE[:3])
    assert expected == pytest.approx(0.9923, abs=1e-4)
    assert float(top_entropy(logits, 3)) == pytest.approx(expected, abs=1e-6)
    assert float(top_entropy(logits, 1)) == pytest.approx(-0.5 * math.log(0.5), abs=1e-6)
    certain = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert float(top_entropy(certain, 3)) == 0.0, "0 · ln 0 is 0, not a NaN"


@pytest.mark.parametrize(("min_entropy", "passes"), [(0.99, 8), (1.0, 1), (100.0, 1)])
def test_a_mismatch_needs_an_unsure_target(min_entropy: float, passes: int) -> None:
    assert accepted(Fly(min_entropy, window=2), {2}) == passes


@pytest.mark.parametrize(
    ("mismatches", "passes"),
    [
        ({1}, 8),
        ({1, 4}, 8),  # 2 and 3 match, so 4 may differ again; 5 and 6 follow it
        ({1, 3}, 0),  # another mismatch inside the window kills the first
        ({1, 2}, 0),
        ({3, 5}, 2),
    ],
)
def test_every_draft_of_the_window_has_to_match(mismatches: set[int], passes: int) -> None:
    assert accepted(Fly(0.3, window=2), mismatches) == passes


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_the_last_drafts_of_a_block_are_strict(window: int) -> None:
    for index in range(1, 9):
        fits = 8 if index + window <= 8 else index - 1
        assert accepted(Fly(0.3, window, block_end="fit"), {index}) == fits
        # The public code leaves the last window + 1 drafts alone.
        margin = 8 if index + window + 1 <= 8 else index - 1
        assert accepted(Fly(0.3, window, block_end="margin"), {index}) == margin


def test_special_tokens_are_strict_both_ways() -> None:
    assert accepted(Fly(0.0, window=0), {2}, drafts=[10, blocks.EOS, 12], length=3) == 1
    made = Fly(0.0, window=0)
    made.open(blocks.spec())
    ending = blocks.verification(blocks.chain([10, 11, 12]), blocks.wanting([10, blocks.EOS, 12, 13]))
    result = made.accept(ending)
    assert (int(result.n), int(result.next)) == (2, blocks.EOS)


def test_a_window_runs_along_its_own_branch() -> None:
    # Branches 1-3-5-7 and 2-4-6-8. Draft 1 differs; 3 and 5 match it, so it passes with a window of two; on the other
    # branch draft 2 differs and 6 does too.
    parents = [-1, 0, 0, 1, 2, 3, 4, 5, 6]
    drafts = blocks.tree([[39, 10, 20, 11, 21, 12, 22, 13, 23]], parents)
    wanted = [30, 11, 21, 12, 30, 13, 23, 30, 30]
    made = Fly(0.3, window=2, block_end="fit")
    made.open(blocks.spec())
    result = made.accept(blocks.verification(drafts, logits_of(wanted, set(range(9)))))
    assert result.path.tolist() == [[0, 1, 3, 5, 7]]
    assert result.relaxed.tolist() == [[False, True, False, False, False]]


def test_rows_of_a_batch_are_verified_by_their_own_lengths() -> None:
    made = Fly(0.3, window=2, block_end="fit")
    made.open(blocks.spec())
    wanted = [10, 30, 12, 13, 31]
    logits = logits_of(wanted, set(range(5))).expand(2, -1, -1)
    drafts = blocks.chain([10, 11, 12, 13], [10, 11, 12, 13], valid=[[True] * 5, [True] * 4 + [False]])
    result = made.accept(blocks.verification(drafts, logits))
    assert result.n.tolist() == [5, 2], "the second row's window lacks its last draft"
