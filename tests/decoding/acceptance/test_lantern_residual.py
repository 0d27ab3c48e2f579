"""Tests LANTERN's residuals on worked examples, and the output distribution against plain Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding.acceptance import Lantern, LanternResidual, Rejection
from decoding.acceptance.rejection import RejectionTrial
from decoding.contracts import VerificationOutput
from decoding.noise import Stream
from tests.decoding import blocks, lantern_by_hand
from tests.decoding.acceptance.test_lantern import NEXT, V, chi_square, emitted, random_case, same
from tests.decoding.acceptance.test_neighbourhood import plain_spec, table_of

pytestmark = pytest.mark.slow

Q = [0.30, 0.25, 0.05, 0.15, 0.25]
P = [0.10, 0.20, 0.30, 0.20, 0.20]
NEAR = {0: [2, 3, 1, 4], 1: [4, 0, 2, 3], 2: [3, 0, 1, 4], 3: [4, 2, 0, 1], 4: [3, 1, 0, 2]}
AFTER = [0.1, 0.2, 0.3, 0.2, 0.2]
"""What follows every draft."""
ROWS = 20_000
Kind = Literal["paper", "code"]


def made(
    k: int, delta: float, residual: Kind, divergence: Any = "tvd", special: frozenset[int] = frozenset()
) -> LanternResidual:
    """The rule over five codes, with k as the public code counts it for "code"."""
    rule = LanternResidual(table_of(NEAR, 5), k, delta, divergence, residual == "paper", residual=residual)
    rule.open(plain_spec(5, special))
    return rule


def weighed(
    rule: LanternResidual, token: int, mass: list[float], drafter: list[float] | None, law: list[float] = Q
) -> tuple[float, list[float]]:
    certain = [float(code == token) for code in range(5)]
    trial = RejectionTrial(
        torch.tensor([law]),
        torch.tensor([mass]),
        torch.tensor([token]),
        torch.tensor([drafter or certain]),
        not drafter,
    )
    weight, rest = rule._drawn.weigh(trial)
    return float(weight), rest[0].tolist()


# --- by hand -------------------------------------------------------------------------------------------------------


def test_the_residual_of_the_paper_removes_the_neighbourhood_and_nothing_else() -> None:
    # A(0) = {0, 2, 3} at δ = 0.21.
    weight, rest = weighed(made(5, 0.21, "paper"), 0, Q, None)
    assert weight == pytest.approx(0.50)
    assert rest == pytest.approx([0.0, 0.5, 0.0, 0.0, 0.5])


def test_the_residual_of_the_published_code_removes_one_neighbour_more_than_it_examines() -> None:
    # Two neighbours of 0 are looked at, (2, 3), of which δ = 0.06 lets in the first; 2, 3 and 1 are emptied.
    weight, rest = weighed(made(2, 0.06, "code"), 0, Q, None)
    assert weight == pytest.approx(0.35)
    assert rest == pytest.approx([0.0, 0.0, 0.0, 0.0, 1.0])
    # Nothing gathered, nothing emptied but the draft.
    weight, rest = weighed(made(2, 0.04, "code"), 0, Q, None)
    assert weight == pytest.approx(0.30)
    assert rest == pytest.approx([0.0, 0.25 / 0.7, 0.05 / 0.7, 0.15 / 0.7, 0.25 / 0.7])


def test_neighbourhoods_use_the_targets_distribution_in_the_paper_and_the_residual_in_the_code() -> None:
    # A refused sibling took 4: what is left of Q is (0.4, 1/3, 1/15, 0.2, 0). The neighbours of 0 are 2 and 3.
    left = [0.30 / 0.75, 0.25 / 0.75, 0.05 / 0.75, 0.15 / 0.75, 0.0]
    # In Q they have 0.20, within 0.21; in what is left 0.267.
    assert weighed(made(3, 0.21, "paper"), 0, left, None)[0] == pytest.approx((0.30 + 0.05 + 0.15) / 0.75)
    assert weighed(made(2, 0.21, "code"), 0, left, None)[0] == pytest.approx((0.30 + 0.05) / 0.75)


def test_special_tokens_keep_their_probability() -> None:
    special = frozenset([3])
    weight, rest = weighed(made(5, 0.06, "paper", special=special), 0, Q, None)
    assert (weight, rest) == (pytest.approx(0.35), pytest.approx([0.0, 0.25 / 0.65, 0.0, 0.15 / 0.65, 0.25 / 0.65]))
    weight, rest = weighed(made(2, 0.06, "code", special=special), 0, Q, None)
    assert (weight, rest) == (pytest.approx(0.35), pytest.approx([0.0, 0.0, 0.0, 0.15 / 0.40, 0.25 / 0.40]))
    assert weighed(made(5, 0.9, "paper", special=special), 3, Q, None)[0] == pytest.approx(0.15)


# --- the distribution that comes out -------------------------------------------------------------------------------


def trial_of(siblings: Tensor, drafter: list[float] | None, temperature: float = 1.0) -> VerificationOutput:
    """`siblings` (b, s) under every root, judged against Q; `drafter` is what they were drawn from."""
    b, count = siblings.shape
    tokens = torch.cat([torch.zeros(b, 1, dtype=torch.long), siblings], dim=1)
    tree = blocks.tree(tokens.tolist(), [-1, *[0] * count])
    if drafter is not None:
        tree = replace(tree, draft_probs=torch.tensor(drafter).expand(b, count + 1, -1))
    logits = torch.tensor([Q, *[AFTER] * count]).log().expand(b, -1, -1)
    return blocks.verification(tree, logits, temperature=temperature)


def drawn_siblings(count: int) -> Tensor:
    """What a policy draws: the best of log p + noise of the drafts' own stream."""
    noise = trial_of(torch.ones(ROWS, 1, dtype=torch.long), None).noise.gumbel(Stream.DRAFT)[:, 0]
    return (torch.tensor(P).log() + noise).topk(count, dim=-1).indices


BOUNDS: list[tuple[str, float]] = [("tvd", 0.21), ("tvd", 0.46), ("jsd", 0.12), ("multiplicative", 2.4)]


@pytest.mark.parametrize(("divergence", "delta"), BOUNDS)
@pytest.mark.parametrize("residual", ["paper", "code"])
@pytest.mark.parametrize("siblings", [(0,), (2, 0), (3, 1, 2)])
def test_certain_siblings_lead_to_the_distribution_worked_out_by_hand(
    siblings: tuple[int, ...], residual: Kind, divergence: Any, delta: float
) -> None:
    """With four degrees of freedom the right one stays under 4.6 but once in a thousand."""
    n = 2
    trial = trial_of(torch.tensor(siblings).expand(ROWS, -1), None)
    result = made(n + (residual == "paper"), delta, residual, divergence).accept(trial)
    expected = lantern_by_hand.residual_output(Q, siblings, None, NEAR, n, divergence, delta, residual)
    assert sum(expected) == pytest.approx(1.0)
    assert chi_square(emitted(trial.tree, result), expected) < 4.6


@pytest.mark.parametrize(("divergence", "delta"), BOUNDS)
@pytest.mark.parametrize("residual", ["paper", "code"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_drawn_siblings_lead_to_the_distribution_worked_out_by_hand(
    count: int, residual: Kind, divergence: Any, delta: float
) -> None:
    """LANTERN++: siblings without replacement, each tried by its probability among those that were left."""
    n = 2
    trial = trial_of(drawn_siblings(count), P)
    result = made(n + (residual == "paper"), delta, residual, divergence).accept(trial)
    expected = lantern_by_hand.drawn_output(Q, P, count, NEAR, n, divergence, delta, residual)
    assert sum(expected) == pytest.approx(1.0)
    assert chi_square(emitted(trial.tree, result), expected) < 4.6


def test_on_a_chain_the_coupled_rule_and_the_papers_residual_have_one_distribution() -> None:
    trial = trial_of(torch.full((ROWS, 1), 0), None)
    coupled = Lantern(table_of(NEAR, 5), 5, 0.21)
    coupled.open(plain_spec(5))
    expected = lantern_by_hand.residual_output(Q, (0,), None, NEAR, 4, "tvd", 0.21, "paper")
    for rule in (coupled, made(5, 0.21, "paper")):
        result = rule.accept(trial)
        assert chi_square(emitted(trial.tree, result), expected) < 4.6
        assert float((result.n == 2).double().mean()) == pytest.approx(0.50, abs=0.015), "q over A(0) is 0.50"


def test_each_level_is_verified_with_the_distributions_of_its_parents() -> None:
    """Two levels; what follows differs below the two children of the root, in target and drafter."""
    laws = [Q, AFTER, [0.4, 0.1, 0.1, 0.1, 0.3], Q, Q]
    drafters = [P, [0.3, 0.1, 0.1, 0.4, 0.1], [0.1, 0.1, 0.2, 0.3, 0.3], P, P]
    draws = blocks.verification(blocks.chain(*[[1, 1]] * ROWS), torch.zeros(ROWS, 3, 5)).noise.gumbel(Stream.DRAFT)
    first = (torch.tensor(P).log() + draws[:, 0]).topk(2, dim=-1).indices
    below = [(torch.tensor(drafters[node]).log() + draws[:, 1]).argmax(-1, keepdim=True) for node in (1, 2)]
    tokens = torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), first, *below], dim=1)
    tree = replace(
        blocks.tree(tokens.tolist(), [-1, 0, 0, 1, 2]), draft_probs=torch.tensor(drafters).expand(ROWS, -1, -1)
    )
    verification = blocks.verification(tree, torch.tensor(laws).log().expand(ROWS, -1, -1), temperature=1.0)
    result = made(3, 0.21, "paper").accept(verification)
    path = tree.tokens.gather(1, result.path)
    second = torch.where(result.n > 2, path[:, 2], result.next)
    for node in (1, 2):
        expected = lantern_by_hand.drawn_output(laws[node], drafters[node], 1, NEAR, 2, "tvd", 0.21, "paper")
        assert chi_square(second[(result.path[:, 1] == node) & (result.n > 1)], expected) < 4.6


# --- what is counted, and zero -------------------------------------------------------------------------------------


def drawn_case(seed: int, temperature: float) -> VerificationOutput:
    """A random tree whose nodes hold the distributions from which their children are drawn."""
    case = random_case(seed, rows=5, num_nodes=8, temperature=temperature)
    generator = torch.Generator().manual_seed(seed + 1)
    probs = torch.randn(5, 8, V, generator=generator).softmax(-1)
    return replace(case, tree=replace(case.tree, draft_probs=probs))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from(["paper", "code"]),
    st.sampled_from(["tvd", "jsd", "multiplicative"]),
    st.booleans(),
)
def test_delta_zero_is_rejection_token_for_token_over_random_trees(
    seed: int, temperature: float, residual: Kind, divergence: Any, certain: bool
) -> None:
    """More than the same distribution: the same draws are put to the same use."""
    case = random_case(seed, 5, 8, temperature) if certain else drawn_case(seed, temperature)
    rule = LanternResidual(
        NEXT, V - 1, 1.0 if divergence == "multiplicative" else 0.0, divergence, False, residual=residual
    )
    rule.open(plain_spec())
    result = rule.accept(case)
    assert same(result, Rejection().accept(case))
    assert not result.relaxed.any()


@pytest.mark.parametrize("residual", ["paper", "code"])
def test_greedy_rows_are_verified_as_by_the_coupled_rule_also_in_batches_with_sampled_rows(residual: Kind) -> None:
    for seed in range(10):
        case = drawn_case(seed, 1.0)
        greedy = torch.tensor([True, False, True, True, False])
        temperature = torch.where(greedy, 0.0, 1.0)
        mixed = replace(case, rows=replace(case.rows, temperature=temperature))
        cold = replace(case, rows=replace(case.rows, temperature=temperature * 0, any_sampled=False))
        rule = LanternResidual(NEXT, 10, 0.4, residual=residual)
        plain = Lantern(NEXT, 10, 0.4)
        rule.open(plain_spec())
        plain.open(plain_spec())
        whole, alone, sampled = rule.accept(mixed), plain.accept(cold), rule.accept(case)
        for name in ("path", "n", "next", "relaxed"):
            got = getattr(whole, name)
            assert got[greedy].equal(getattr(alone, name)[greedy]), (seed, name)
            assert got[~greedy].equal(getattr(sampled, name)[~greedy]), (seed, name)
        assert same(rule.accept(cold), alone)
