"""Tests the C++ attention kernel against torch in float64, over rows, heads, nodes, lengths and layouts."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.backends.attention import mask_bias, tree_mask
from models.backends.cpu import attention
from models.backends.cpu.attention import OPERATION, attend_rows, can_attend
from models.backends.cpu.build import Library
from models.backends.cpu.compiled import CompiledDecoder
from models.kv.lanes import SlotBatch
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.text import held_out_prompts

# Importing torch's own compiler warns of a part of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """Sizes of one forward: rows, key-value heads, heads of each, nodes, size of a head."""

    rows: int
    kv_heads: int
    groups: int
    nodes: int
    dim: int


class Forward(NamedTuple):
    """What one forward is given, memory included."""

    query: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor
    lens: Tensor
    columns: Tensor
    mask: Tensor


def forward(case: Case, dtype: torch.dtype, seed: int, capacity: int = 90) -> Forward:
    """A random forward over rows of random lengths, with trees; heads lie within nodes, as layers make them."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows, kv_heads, groups, nodes, dim = case
    lens = torch.randint(0, capacity - nodes, (rows,), generator=generator)
    parents = torch.tensor(
        [[-1] + [int(torch.randint(0, n, (1,), generator=generator)) for n in range(1, nodes)]] * rows
    )
    visible = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
    for node in range(1, nodes):
        visible[:, node] |= visible[:, int(parents[0, node])]
    window = min(capacity, int(lens.max()) + nodes + int(torch.randint(0, 9, (1,), generator=generator)))
    return Forward(
        numbers(rows, nodes, kv_heads * groups, dim).transpose(1, 2),
        numbers(rows, nodes, kv_heads, dim).transpose(1, 2),
        numbers(rows, nodes, kv_heads, dim).transpose(1, 2),
        numbers(rows + 2, kv_heads, capacity + 1, dim),
        numbers(rows + 2, kv_heads, capacity + 1, dim),
        lens,
        lens[:, None] + torch.arange(nodes),
        mask_bias(tree_mask(lens, visible, window), dtype),
    )


def expected(inputs: Forward, num_rows: int) -> Tensor:
    """What `attend_rows` has to give, by torch and in double precision; the memory is not changed."""
    keys, values = inputs.keys.clone(), inputs.values.clone()
    for row in range(num_rows):
        for node in range(inputs.columns.shape[1]):
            keys[row, :, inputs.columns[row, node]] = inputs.key[row, :, node]
            values[row, :, inputs.columns[row, node]] = inputs.value[row, :, node]
    window = inputs.mask.shape[3]
    read = (memory[:num_rows, :, :window].double() for memory in (keys, values))
    mixed = F.scaled_dot_product_attention(
        inputs.query.double(), *read, attn_mask=inputs.mask.double(), scale=0.3, enable_gqa=True
    )
    return mixed.transpose(1, 2)


@settings(max_examples=60, deadline=None)
@given(
    case=st.builds(
        Case,
        st.integers(1, 5),
        st.integers(1, 3),
        st.integers(1, 4),
        st.integers(1, 14),
        st.sampled_from([32, 64, 96, 128, 160]),
    ),
    dtype=st.sampled_from(list(TOLERANCES)),
    seed=st.integers(0, 1000),
)
@example(Case(3, 2, 1, 1, 64), torch.bfloat16, 0)
@example(Case(3, 2, 3, 5, 128), torch.float32, 1)
@example(Case(1, 1, 1, 6, 96), torch.float32, 2)
def test_attention_in_loops_equals_that_of_torch(case: Case, dtype: torch.dtype, seed: int) -> None:
    inputs = forward(case, dtype, seed)
    wanted = expected(inputs, case.rows)
    rows = torch.arange(case.rows)
    got = attend_rows(
        inputs.query, inputs.key, inputs.value, inputs.keys, inputs.values, rows, inputs.columns, inputs.mask, 0.3
    )
    assert got.shape == (case.rows, case.nodes, case.kv_heads * case.groups, case.dim)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=TOLERANCES[dtype])


@settings(max_examples=30, deadline=None)
@given(
    case=st.builds(Case, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 50), st.just(64)),
    dtype=st.sampled_from(list(TOLERANCES)),
    seed=st.integers(0, 1000),
)
@example(Case(2, 2, 1, 40, 64), torch.float32, 0)
@example(Case(2, 2, 3, 255, 64), torch.bfloat16, 1)
@example(Case(2, 2, 3, 256, 64), torch.bfloat16, 2)
@example(Case(1, 1, 2, 1023, 32), torch.float32, 3)
@example(Case(1, 1, 2, 1024, 32), torch.float32, 4)
def test_without_a_mask_attention_is_causal_and_the_kv_cache_is_written(
    case: Case, dtype: torch.dtype, seed: int
) -> None:
    inputs = forward(case, dtype, seed, capacity=case.nodes + 10)
    wanted = F.scaled_dot_product_attention(
        inputs.query.double(), inputs.key.double(), inputs.value.double(), is_causal=True, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    # Fresh prompts go to any rows of the memory.
    rows = torch.randperm(case.rows + 2, generator=torch.Generator().manual_seed(seed))[: case.rows]
    before = inputs.keys.clone(), inputs.values.clone()
    got = attend_rows(
        inputs.query, inputs.key, inputs.value, inputs.keys, inputs.values, rows, inputs.columns, None, 0.3
    )
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=TOLERANCES[dtype])
    for memory, was, entries in ((inputs.keys, before[0], inputs.key), (inputs.values, before[1], inputs.value)):
        for index, row in enumerate(rows.tolist()):
            was[row][:, inputs.columns[index]] = entries[index]
        assert torch.equal(memory, was), "nothing else was written"


def test_sums_do_not_depend_on_other_rows_nodes_or_the_window() -> None:
    inputs = forward(Case(4, 2, 2, 7, 64), torch.bfloat16, 3)
    rows = torch.arange(4)
    both = attend_rows(
        inputs.query, inputs.key, inputs.value, inputs.keys, inputs.values, rows, inputs.columns, inputs.mask, 0.3
    )
    window = int(inputs.lens[0]) + 1
    alone = attend_rows(
        inputs.query[:1, :, :1],
        inputs.key[:1, :, :1],
        inputs.value[:1, :, :1],
        inputs.keys,
        inputs.values,
        rows[:1],
        inputs.columns[:1, :1],
        inputs.mask[:1, :, :1, :window],
        0.3,
    )
    assert torch.equal(alone, both[:1, :1])


def test_kv_positions_after_the_last_visible_one_are_never_read() -> None:
    inputs = forward(Case(2, 1, 1, 3, 64), torch.float32, 5)
    wanted = expected(inputs, 2)
    for row in range(2):
        inputs.keys[row, :, int(inputs.columns[row, -1]) + 1 :] = math.nan
        inputs.values[row, :, int(inputs.columns[row, -1]) + 1 :] = math.nan
    got = attend_rows(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.keys,
        inputs.values,
        torch.arange(2),
        inputs.columns,
        inputs.mask,
        0.3,
    )
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_nan_and_infinity_stay_in_their_rows(dtype: torch.dtype) -> None:
    inputs = forward(Case(3, 1, 1, 2, 64), dtype, 7)
    inputs.query[1, 0, 0, 5] = math.nan
    inputs.value[2, 0, 0, 40] = math.inf
    got = attend_rows(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.keys,
        inputs.values,
        torch.arange(3),
        inputs.columns,
        inputs.mask,
        0.3,
    )
    assert got[0].isfinite().all()
    assert got[1, 0].isnan().all()
    assert got[1, 1].isfinite().all()
    assert bool(got[2, 0, 0, 40] == math.inf)


def test_halves_are_rounded_to_even() -> None:
    inputs = forward(Case(8, 2, 1, 1, 64), torch.bfloat16, 13)
    # A query without a direction mixes its two columns half and half, which is often just between two numbers.
    columns = torch.ones_like(inputs.columns)
    mask = torch.zeros(8, 1, 1, 2, dtype=torch.bfloat16)
    rows = torch.arange(8)
    got = attend_rows(inputs.query * 0, inputs.key, inputs.value, inputs.keys, inputs.values, rows, columns, mask, 0.3)
    wanted = ((inputs.values[:8, :, 0].float() + inputs.value[:, :, 0].float()) / 2).bfloat16()
    assert torch.equal(got[:, 0], wanted)


def test_large_scores_do_not_overflow() -> None:
    inputs = forward(Case(2, 2, 1, 4, 64), torch.float32, 9)
    big = inputs._replace(query=inputs.query * 1e4)
    got = attend_rows(big.query, big.key, big.value, big.keys, big.values, torch.arange(2), big.columns, big.mask, 0.3)
    torch.testing.assert_close(got.double(), expected(big, 2), rtol=0, atol=1e-3)


def test_a_compiled_call_writes_the_kv_cache_in_place() -> None:
    inputs = forward(Case(2, 2, 1, 3, 64), torch.float32, 11)

    def run(keys: Tensor, values: Tensor) -> Tensor:
        return (
            OPERATION(
                inputs.query, inputs.key, inputs.value, keys, values, torch.arange(2), inputs.columns, inputs.mask, 0.3
            )
            * 2
        )

    copies = inputs.keys.clone(), inputs.values.clone()
    wanted = run(inputs.keys, inputs.values)
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(*copies)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(copies[0], inputs.keys)
    assert torch.equal(copies[1], inputs.values)


def test_unsupported_dtypes_and_sizes_run_in_torch() -> None:
    def memory(dim: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        return torch.zeros(2, 1, 3, dim, dtype=dtype, device=device)

    assert can_attend(memory(64, torch.bfloat16))
    assert not can_attend(memory(64, torch.float16))
    assert not can_attend(memory(64, torch.float64))
    assert not can_attend(memory(80, torch.float32))
    assert not can_attend(memory(64, torch.float32, "meta"))


@pytest.mark.slow
def test_without_a_build_attention_runs_in_torch_and_a_warning_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no C++;")
    torch._dynamo.reset()
    without = Library((broken,), {"step_fp32": []}, "attention on this CPU stays torch's own")
    monkeypatch.setattr(attention, "LIBRARY", without)
    try:
        with caplog.at_level(logging.WARNING, logger="models.backends.cpu.build"):
            assert not can_attend(torch.zeros(2, 1, 3, 64))
            assert not can_attend(torch.zeros(2, 1, 3, 64))
        assert [record.message for record in caplog.records if "stays torch's own" in record.message] == [
            record.message for record in caplog.records
        ]
        assert len(caplog.records) == 1
        assert without.library() is None
        target = Target.load(CheckpointRef(str(CHECKPOINTS / "text_target")), "float32", "cpu")
        assert target.compile()
        lanes = target.lanes(2, 1, 200)
        prompts = [[target.encode(prompt, ())] for prompt in held_out_prompts(2, 0)]
        slots = SlotBatch(torch.arange(2), (0, 1), (0, 0))
        with torch.inference_mode():
            first = lanes.admit(slots, prompts).last
            torch.testing.assert_close(lanes.admit(slots, prompts).last, first, atol=2e-4, rtol=1e-4)
        assert isinstance(target._run, CompiledDecoder)
        assert target._run.compiled, "the rest of the layers is compiled all the same"
    finally:
        torch._dynamo.reset()
