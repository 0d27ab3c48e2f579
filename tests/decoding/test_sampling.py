"""Penalties and filters do what transformers' logits processors do, row by row and node by node."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding.sampling import RowSampling, process_logits
from decoding.tree import NO_TOKEN

V = 23


def row_sampling(rows: list[tuple[float, int, float, float, float]], seen: torch.Tensor | None) -> RowSampling:
    columns = list(zip(*rows, strict=True))
    return RowSampling(
        temperature=torch.tensor(columns[0]),
        top_k=torch.tensor(columns[1]),
        top_p=torch.tensor(columns[2]),
        penalty=torch.tensor(columns[3]),
        seen=seen,
        any_sampled=any(t > 0 for t in columns[0]),
        max_top_k=max(columns[1]),
        any_top_p=any(p < 1 for p in columns[2]),
        min_p=torch.tensor(columns[4]) if any(columns[4]) else None,
    )


PARAMETERS = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    st.integers(0, V + 3),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([1.0, 1.3, 0.7]),
    st.sampled_from([0.0, 0.1, 0.7, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(PARAMETERS, min_size=1, max_size=4), seed=st.integers(0, 10_000), ties=st.booleans())
def test_logits_of_each_row_are_processed_as_in_transformers(
    rows: list[tuple[float, int, float, float, float]], seed: int, ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 1, V, generator=generator) * 3
    if ties:
        logits = logits.round()
    history = torch.randint(0, V, (len(rows), 6), generator=generator)
    seen = torch.zeros(len(rows), V, dtype=torch.bool).scatter(1, history, True)
    ours = process_logits(logits, row_sampling(rows, seen))
    for i, (temperature, top_k, top_p, penalty, min_p) in enumerate(rows):
        expected = logits[i]
        if penalty != 1.0:
            expected = RepetitionPenaltyLogitsProcessor(penalty)(history[i : i + 1], expected)
        if temperature > 0:
            expected = TemperatureLogitsWarper(temperature)(history[i : i + 1], expected)
            if top_k:
                expected = TopKLogitsWarper(top_k)(history[i : i + 1], expected)
            if top_p < 1:
                expected = TopPLogitsWarper(top_p)(history[i : i + 1], expected)
            if min_p:
                expected = MinPLogitsWarper(min_p)(history[i : i + 1], expected)
        torch.testing.assert_close(ours[i], expected)


@settings(max_examples=60, deadline=None)
@given(temperature=st.floats(0, 1e-8, exclude_min=True), top_k=st.integers(0, 3), top_p=st.sampled_from([0.5, 1.0]))
def test_the_coldest_temperatures_draw_what_greedy_rows_take(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(1, 4, V, generator=torch.Generator().manual_seed(1)) * 100
    out = process_logits(logits, row_sampling([(temperature, top_k, top_p, 1.0, 0.0)], None))
    noise = torch.rand(1, 4, V, generator=torch.Generator().manual_seed(2)) * 20
    assert not out.isnan().any()
    assert not (out == torch.inf).any()
    assert (out + noise).argmax(dim=-1).tolist() == logits.argmax(dim=-1).tolist()


def test_the_penalty_counts_the_tokens_between_the_last_committed_one_and_the_node() -> None:
    logits = torch.ones(1, 2, V)
    seen = torch.zeros(1, V, dtype=torch.bool)
    seen[0, 5] = True
    path = torch.tensor([[[7, NO_TOKEN], [7, 8]]])
    out = process_logits(logits, row_sampling([(0.0, 0, 1.0, 2.0, 0.0)], seen), path)
    assert [i for i in range(V) if out[0, 0, i] == 0.5] == [5, 7]
    assert [i for i in range(V) if out[0, 1, i] == 0.5] == [5, 7, 8]


def test_padded_nodes_do_not_count_for_the_repetition_penalty() -> None:
    seen = torch.zeros(1, V, dtype=torch.bool)
    out = process_logits(
        torch.ones(1, 1, V), row_sampling([(0.0, 0, 1.0, 2.0, 0.0)], seen), torch.tensor([[[0, NO_TOKEN]]])
    )
    assert [i for i in range(V) if out[0, 0, i] == 0.5] == [0]
    out = process_logits(
        torch.ones(1, 1, V), row_sampling([(0.0, 0, 1.0, 2.0, 0.0)], seen), torch.tensor([[[9, NO_TOKEN]]])
    )
    assert [i for i in range(V) if out[0, 0, i] == 0.5] == [9]
