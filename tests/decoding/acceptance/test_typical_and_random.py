"""Tests typical acceptance on worked examples, and the share, keys and limits of random relaxation."""

from __future__ import annotations

import math

import pytest
import torch

from decoding.acceptance import RandomRelaxation, Typical
from decoding.contracts import VerificationOutput
from tests.decoding import blocks

PROBS = [0.5, 0.3, 0.15, 0.05]
"""H = 1.1421 nats, so 0.3 · exp(−H) = 0.0957 and the bound is min(0.09, 0.0957) = 0.09."""


def after_root(probs: list[float], draft: int, temperature: float = 0.0) -> VerificationOutput:
    """One draft under a target with `probs` for tokens 10, 11, … after the root."""
    logits = torch.full((1, 2, blocks.VOCAB_SIZE), -torch.inf)
    logits[0, :, 10 : 10 + len(probs)] = torch.tensor(probs).log()
    return blocks.verification(blocks.chain([draft]), logits, temperature=temperature)


def passes(made: Typical, probs: list[float], draft: int) -> bool:
    made.open(blocks.spec())
    result = made.accept(after_root(probs, draft))
    assert int(result.next) == 10, "the token after the path is the target's best"
    return int(result.n) == 2


def test_a_draft_passes_above_the_smaller_of_two_bounds() -> None:
    entropy = -sum(p * math.log(p) for p in PROBS)
    assert 0.3 * math.exp(-entropy) == pytest.approx(0.0957, abs=1e-4)
    rule = Typical(temperature=1.0)
    assert [passes(rule, PROBS, 10 + i) for i in range(4)] == [True, True, True, False]


def test_an_uncertain_target_lowers_the_bound() -> None:
    # Twenty equal tokens: H = ln 20, bound 0.3 / 20 = 0.015 < p = 0.05.
    assert passes(Typical(temperature=1.0), [0.05] * 20, 25)
    assert not passes(Typical(temperature=1.0, alpha=1.0), [0.051] + [0.949 / 19] * 19, 25), "1 / e^H is above p"


def test_greedy_rows_are_softened_by_the_rules_own_temperature() -> None:
    # At 0.5 probabilities are squared: (0.25, 0.09, 0.0225, 0.0025) / 0.365, and 0.0616 is below
    # 0.3 · exp(−0.878) = 0.125, cut to 0.09.
    assert passes(Typical(temperature=0.5), PROBS, 11)
    assert not passes(Typical(temperature=0.5), PROBS, 12)


def test_sampled_rows_are_verified_with_the_processed_logits() -> None:
    rule = Typical(temperature=100.0)
    rule.open(blocks.spec())
    outcomes = {}
    for draft in (10, 11, 12, 13):
        result = rule.accept(after_root(PROBS, draft, temperature=0.5))
        outcomes[draft] = (int(result.n) == 2, bool(result.relaxed[0, 1]))
    drawn = [draft for draft, (taken, relaxed) in outcomes.items() if taken and not relaxed]
    assert len(drawn) == 1, "exactly one draft is the row's own draw"
    assert {draft for draft, (taken, _) in outcomes.items() if taken} == {10, 11, *drawn}


def test_of_equally_long_paths_the_likelier_wins() -> None:
    # Both 12 and 11 pass; 11 is the second sibling and is likelier.
    logits = torch.full((1, 3, blocks.VOCAB_SIZE), -torch.inf)
    logits[0, :, 10:14] = torch.tensor(PROBS).log()
    rule = Typical(temperature=1.0)
    rule.open(blocks.spec())
    result = rule.accept(blocks.verification(blocks.tree([[39, 12, 11]], [-1, 0, 0]), logits))
    assert result.path.tolist() == [[0, 2]]


def test_specials_are_strict_under_typical_acceptance() -> None:
    logits = torch.full((1, 2, blocks.VOCAB_SIZE), -torch.inf)
    logits[0, :, [10, blocks.EOS]] = torch.tensor([0.6, 0.4]).log()
    rule = Typical(temperature=1.0)
    rule.open(blocks.spec())
    assert int(rule.accept(blocks.verification(blocks.chain([blocks.EOS]), logits)).n) == 1


# --- random --------------------------------------------------------------------------------------------------------


def relax(
    probability: float, rows: int = 600, position: int = 5, drafts: list[int] | None = None
) -> VerificationOutput:
    tokens = drafts or [10, 11, 12]
    drafts_of_all = blocks.chain(*[tokens] * rows)
    return blocks.verification(drafts_of_all, blocks.wanting(*[[30] * 4] * rows), position=position)


def lengths(probability: float, **kwargs: int) -> torch.Tensor:
    rule = RandomRelaxation(probability)
    rule.open(blocks.spec())
    return rule.accept(relax(probability, **kwargs)).n - 1


def test_a_probability_of_0_accepts_no_draft_and_of_1_accepts_every_draft() -> None:
    assert lengths(0.0).tolist() == [0] * 600
    assert lengths(1.0).tolist() == [3] * 600


def test_mismatches_are_accepted_independently_with_the_given_probability() -> None:
    num_accepted = lengths(0.6, rows=4000)
    # Lengths 0 … 3 of a chain of three mismatches: 0.4, 0.24, 0.144, 0.216.
    counts = torch.bincount(num_accepted, minlength=4) / 4000
    torch.testing.assert_close(counts, torch.tensor([0.4, 0.24, 0.144, 0.216]), atol=0.03, rtol=0)


def test_the_draws_belong_to_sample_and_position() -> None:
    rule = RandomRelaxation(0.5)
    rule.open(blocks.spec())
    whole = rule.accept(relax(0.5, rows=40)).n.tolist()
    for row in (0, 7, 39):
        keys = torch.tensor([[row + 11, row + 77]])
        alone = blocks.verification(blocks.chain([10, 11, 12]), blocks.wanting([30] * 4), keys=keys)
        assert rule.accept(alone).n.tolist() == [whole[row]]
    # A draft's draw follows its place in the text: two places on, the first draft meets the third one's draw.
    first = rule.accept(relax(0.5, rows=40, position=7)).n > 1
    passes_third = rule.pardon(relax(0.5, rows=40), None)[:, 0, 3]  # type: ignore[arg-type]
    assert first.tolist() == passes_third.tolist()


def test_siblings_have_a_draw_each() -> None:
    rule = RandomRelaxation(0.5)
    rule.open(blocks.spec())
    drafts = blocks.tree([[39, 10, 11]] * 400, [-1, 0, 0])
    taken = rule.accept(blocks.verification(drafts, blocks.wanting(*[[30] * 3] * 400))).path[:, 1]
    share = torch.bincount(taken, minlength=3) / 400
    torch.testing.assert_close(share, torch.tensor([0.25, 0.5, 0.25]), atol=0.07, rtol=0)
