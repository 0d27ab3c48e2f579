"""LANTERN on worked examples: which drafts match the target's draw, which exceed its best token, and the counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.acceptance import Exact, Lantern
from decoding.acceptance.walk import target_choice
from decoding.contracts import VerificationOutput
from decoding.noise import Stream
from decoding.tree import AcceptanceResult, DraftTree
from tests.decoding import blocks, lantern_by_hand
from tests.decoding.acceptance.test_neighbourhood import plain_spec

V = blocks.VOCAB_SIZE
NEXT = torch.stack([(torch.arange(V) + step) % V for step in range(1, V)], dim=1)
"""The neighbours of code c are c + 1, c + 2, …"""
PROBS = {10: 0.30, 11: 0.05, 12: 0.25, 13: 0.15, 14: 0.25}


def opened(rule: Lantern, special: frozenset[int] = frozenset()) -> Lantern:
    rule.open(plain_spec(special=special))
    return rule


def logits_of(*nodes: dict[int, float]) -> torch.Tensor:
    """Logits (1, N, V) with the given probabilities after each node."""
    out = torch.full((1, len(nodes), V), -torch.inf)
    for node, probs in enumerate(nodes):
        for token, share in probs.items():
            out[0, node, token] = torch.tensor(share).log()
    return out


def repeated(drafts: DraftTree, count: int) -> DraftTree:
    return blocks.tree(drafts.tokens.tolist() * count, drafts.parents[0].tolist(), drafts.valid.tolist() * count)


def random_case(seed: int, rows: int, num_nodes: int, temperature: float, sharp: float = 1.5) -> VerificationOutput:
    """A random tree of one shape for all rows, siblings of different tokens, some nodes invalid."""
    generator = torch.Generator().manual_seed(seed)
    parents = [-1, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, num_nodes))]
    tokens = torch.stack([torch.randperm(V, generator=generator)[:num_nodes] for _ in range(rows)])
    valid = torch.rand(rows, num_nodes, generator=generator) > 0.15
    valid[:, 0] = True
    for node, parent in enumerate(parents[1:], start=1):
        valid[:, node] &= valid[:, parent]
    logits = sharp * torch.randn(rows, num_nodes, V, generator=generator)
    return blocks.verification(
        blocks.tree(tokens.tolist(), parents, valid.tolist()), logits, temperature=temperature, position=seed
    )


def same(result: AcceptanceResult, other: AcceptanceResult) -> bool:
    kept = torch.arange(result.path.shape[1]) < result.n[:, None]
    return result.n.equal(other.n) and result.next.equal(other.next) and bool((result.path == other.path)[kept].all())


# --- greedy --------------------------------------------------------------------------------------------------------


def test_greedy_rows_are_verified_with_the_target_logits_whatever_the_filters_of_other_rows() -> None:
    """In a batch with a sampled row: temperature and filters are for that row alone."""
    verification = blocks.verification(
        blocks.chain([12], [12]), logits_of(PROBS, {7: 1.0}).expand(2, -1, -1), temperature=0.7
    )
    temperature = torch.tensor([0.0, 0.7])
    processed_logits = verification.target_logits / torch.tensor([1.0, 0.7])[:, None, None]
    mixed = replace(
        verification, processed_logits=processed_logits, rows=replace(verification.rows, temperature=temperature)
    )
    assert int(opened(Lantern(NEXT, 5, 0.16)).accept(mixed).n[0]) == 2
    assert int(opened(Lantern(NEXT, 5, 0.10)).accept(mixed).n[0]) == 1


@pytest.mark.parametrize("divergence", ["tvd", "jsd", "multiplicative"])
@pytest.mark.parametrize("seed", range(12))
def test_greedy_verdicts_equal_a_slow_loop_written_from_the_paper(seed: int, divergence: Any) -> None:
    # So that of the drafts that are not the best themselves about half pass.
    delta = {"tvd": 0.11, "jsd": 0.05, "multiplicative": 6.3}[divergence]
    case = random_case(seed, rows=12, num_nodes=9, temperature=0.0, sharp=0.8)
    k = 3 + 5 * (seed % 6)
    result = opened(Lantern(NEXT, k, delta, divergence)).accept(case)
    num_relaxed = 0
    for row in range(12):
        best = lantern_by_hand.longest_greedy(case.tree, row, case.processed_logits, NEXT, k - 1, divergence, delta)
        n = int(result.n[row])
        path = result.path[row, 1:n].tolist()
        assert path in best, (row, path, best)
        last = path[-1] if path else 0
        assert int(result.next[row]) == int(case.processed_logits[row, last].argmax())
        above = [0, *path][: n - 1]
        odd = [
            int(case.processed_logits[row, a].argmax()) != int(case.tree.tokens[row, b])
            for a, b in zip(above, path, strict=True)
        ]
        assert result.relaxed[row].tolist() == [False, *odd, *[False] * (case.tree.num_levels + 1 - n)]
        num_relaxed += sum(odd)
    assert num_relaxed > 0 or k == 3, "nothing was relaxed, so nothing was tested"


# --- sampled -------------------------------------------------------------------------------------------------------


def drawn(
    siblings: list[int], delta: float, rows: int = 4000, k: int = 5, **options: Any
) -> tuple[torch.Tensor, AcceptanceResult]:
    """The target's own draws after the root, and the results on `siblings`."""
    tree = repeated(blocks.tree([[39, *siblings]], [-1, *[0] * len(siblings)]), rows)
    logits = logits_of(PROBS, *[{7: 1.0}] * len(siblings)).expand(rows, -1, -1)
    verification = blocks.verification(tree, logits, temperature=1.0)
    return target_choice(verification)[:, 0], opened(Lantern(NEXT, k, delta, **options)).accept(verification)


def test_a_sampled_draft_passes_where_the_targets_draw_is_in_its_neighbourhood() -> None:
    # A(12) = {12, 13} at δ = 0.16, {12, 13, 14} at 0.41.
    for delta, lenders in ((0.0, {12}), (0.16, {12, 13}), (0.41, {12, 13, 14})):
        y, result = drawn([12], delta)
        assert (result.n == 2).equal(torch.isin(y, torch.tensor(sorted(lenders))))
        assert result.relaxed[:, 1].equal(torch.isin(y, torch.tensor(sorted(lenders - {12}))))
        refused = result.n == 1
        assert result.next[refused].equal(y[refused]), "where it is refused the target's own draw is emitted"


def test_of_siblings_whose_neighbourhoods_hold_the_draw_the_first_is_taken() -> None:
    # A(11) = {11, 12}, A(12) = {12, 13} at δ = 0.26; 12 is in both, and is itself the second sibling.
    y, result = drawn([11, 12, 14], 0.26)
    taken = result.path[:, 1]
    expected = {10: (0, False), 11: (1, False), 12: (1, True), 13: (2, True), 14: (3, False)}
    for token, (node, is_relaxed) in expected.items():
        assert set(taken[y == token].tolist()) == {node}
        assert set(result.relaxed[y == token, 1].tolist()) == {is_relaxed}
    assert set(y.tolist()) == set(expected)


def test_given_a_draft_of_the_same_noise_its_neighbours_are_drawn_more_often_than_delta() -> None:
    """Target 0.9, 0.1 on codes 20 and 11, drafter on 20 and 10: where 20 loses to one it often loses to both."""
    rows = 40_000
    tree = blocks.chain(*[[10]] * rows)
    verification = blocks.verification(
        tree, logits_of({20: 0.9, 11: 0.1}, {7: 1.0}).expand(rows, -1, -1), temperature=1.0
    )
    noise = verification.noise.gumbel(Stream.TOKEN)[:, 0]
    drafted = (logits_of({20: 0.9, 10: 0.1})[0, 0] + noise).argmax(-1) == 10
    relaxed = opened(Lantern(NEXT, 2, 0.11)).accept(verification).relaxed[:, 1]
    assert float(relaxed.double().mean()) == pytest.approx(0.1, abs=0.01), "a draft that knows nothing of the noise"
    # 1 − 0.9 − 0.9 + 0.9 / 1.1 of all rows, of the tenth where 10 is drafted.
    assert float(relaxed[drafted].double().mean()) == pytest.approx(0.182, abs=0.02)


def chi_square(tokens: torch.Tensor, probs: list[float]) -> float:
    """Statistic per degree of freedom."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    expected = torch.tensor(probs, dtype=torch.float64) * len(tokens)
    used = expected > 0
    assert not counts[~used].any(), "a token without probability came out"
    return float(((counts - expected)[used] ** 2 / expected[used]).sum() / (int(used.sum()) - 1))


def emitted(tree: DraftTree, result: AcceptanceResult) -> torch.Tensor:
    """The first token that each row puts out."""
    return torch.where(result.n > 1, tree.tokens.gather(1, result.path[:, 1:2])[:, 0], result.next)


@pytest.mark.parametrize(("siblings", "delta"), [([12], 0.16), ([11, 12, 14], 0.26), ([13, 12, 10], 0.41)])
def test_a_sampled_token_has_the_distribution_of_the_papers_rule(siblings: list[int], delta: float) -> None:
    """With at most four degrees of freedom the right one stays under 4.6 but once in a thousand."""
    q = [PROBS.get(token, 0.0) for token in range(V)]
    near = {draft: NEXT[draft].tolist() for draft in siblings}
    a = {draft: lantern_by_hand.lenders_of(q, draft, near[draft][:4], "tvd", delta) for draft in siblings}
    expected = lantern_by_hand.coupled_output(q, siblings, a)
    by_residual = lantern_by_hand.residual_output(q, siblings, None, near, 4, "tvd", delta, "paper")
    assert by_residual == pytest.approx(expected), "drawing y once is trying siblings in turn and drawing a residual"
    _, result = drawn(siblings, delta, rows=8000)
    tree = repeated(blocks.tree([[39, *siblings]], [-1, *[0] * len(siblings)]), 8000)
    assert chi_square(emitted(tree, result), expected) < 4.6
    assert chi_square(emitted(tree, result), q) > 20, "the emitted distribution must differ from the target's"


# --- zero ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from(["tvd", "jsd", "multiplicative"]),
    st.integers(1, V - 1),
    st.booleans(),
)
def test_delta_zero_is_exact_token_for_token_over_random_trees(
    seed: int, temperature: float, divergence: Any, k: int, k_counts_draft: bool
) -> None:
    case = random_case(seed, rows=5, num_nodes=8, temperature=temperature)
    zero = 1.0 if divergence == "multiplicative" else 0.0
    result = opened(Lantern(NEXT, k, zero, divergence, k_counts_draft)).accept(case)
    assert same(result, Exact().accept(case))
    assert not result.relaxed.any()


# --- specials ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_special_tokens_are_strict_in_both_directions(temperature: float) -> None:
    special = frozenset([13])
    rule = opened(Lantern(NEXT, 5, 0.9), special)
    for draft in (12, 13):
        tree = blocks.chain(*[[draft]] * 300)
        verification = blocks.verification(
            tree, logits_of(PROBS, {7: 1.0}).expand(300, -1, -1), temperature=temperature
        )
        y = target_choice(verification)[:, 0]
        taken = rule.accept(verification).n == 2
        wanted = {12, 14} if draft == 12 else {13}
        if temperature:
            assert taken.tolist() == [token in wanted for token in y.tolist()]
        else:
            # 12 gathers 14 alone: 0.50 > 0.30; 13 gathers nothing.
            assert taken.all() if draft == 12 else not taken.any()
