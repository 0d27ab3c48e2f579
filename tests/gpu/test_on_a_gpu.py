"""Tests on a GPU: the kernel against attention under one mask, graphs against eager steps, no synchronisation.

    python -m pytest tests/gpu -m gpu      # torch, transformers, llguidance and pytest with its plug-ins; no Ray

A CPU runs those that it can, and runs steps again in place of graphs.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.decoding import CONTENDERS, Bench
from benchmarks.gpu.models import TextPair, make_text_pair
from benchmarks.gpu.sizes import TINY
from benchmarks.harness.verdict import judge
from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import ModelDrafter
from decoding.scheduling import replay
from decoding.trees import Chain
from models.backends.cuda.graphs import CapturedDecoder
from models.backends.cuda.tree_attention import MAX_HEAD_BYTES
from models.loading.quantization import KINDS, why_not
from models.target import Target
from tests import toys
from tests.conformance import checks
from tests.models.attention_cases import BUSH, CHAIN, FOREST, both_ways, tree

pytestmark = pytest.mark.slow

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
LONG = [-1, *range(40)]
"""A chain of 41 nodes, whose queries are several blocks."""
HEADS = [((4, 4), 64), ((8, 2), 128), ((7, 1), 128), ((4, 4), 80), ((2, 1), 256)]
"""Query and key heads, and their size."""
ON_GPU = [pytest.param("cuda", marks=NEEDS_GPU)]


def make_pair(device: str, dtype: str) -> TextPair:
    return make_text_pair(replace(TINY, dtype=dtype), torch.device(device))


def requests(pair: TextPair) -> list[Request]:
    """More than there are slots, of several lengths, so that batches shrink and slots are refilled."""
    return [
        Request(str(number), text, sampling=Sampling(max_new_tokens=3 + number % 5))
        for number, text in enumerate(pair.prompts)
    ]


@pytest.mark.parametrize("device", ON_GPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "head_size"), [((4, 4), 64), ((8, 2), 128), ((7, 1), 128), ((4, 4), 80), ((2, 1), 256)]
)
@pytest.mark.parametrize("parents", [CHAIN, BUSH, FOREST, [-1], LONG])
@pytest.mark.parametrize("lens", [[7], [3, 210, 128], [0, 500, 0], [2900]])
def test_the_kernel_equals_one_mask(
    device: str, lens: list[int], parents: list[int], heads: tuple[int, int], head_size: int, dtype: torch.dtype
) -> None:
    from models.backends.cuda.tree_kernel import tree_attention  # needs Triton

    if head_size * dtype.itemsize > MAX_HEAD_BYTES:
        pytest.skip("such heads use the mask")
    visible = tree(parents, len(lens)).to(device)
    got, expected = both_ways(tree_attention, lens, visible, 0, heads, dtype, head_size**-0.5, head_size, 3000)
    # Weights are rounded before the product with V, and the sum after it; fp32 sums thousands in another order.
    num_eps = 64 if dtype == torch.float32 else 4
    assert (got.float() - expected).abs().max() <= num_eps * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("device", ON_GPU)
def test_the_kernel_serves_a_drafters_levels(device: str) -> None:
    from models.backends.cuda.tree_kernel import tree_attention

    visible = tree(BUSH, 3)[:, 3:6, :6].to(device)
    got, expected = both_ways(tree_attention, [0, 5, 33], visible, 3, (8, 2), torch.bfloat16, 0.125, 64)
    assert (got.float() - expected).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * expected.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_method_produces_the_targets_output(device: str, dtype: str) -> None:
    pair = make_pair(device, dtype)
    asked = [
        Request(str(number), text, sampling=Sampling(max_new_tokens=8)) for number, text in enumerate(pair.prompts)
    ]
    for name in CONTENDERS:
        bench = Bench(pair, name, 3, TINY.gamma)
        bench.run(asked, True)
        verdict = judge(bench.outcomes[0].outputs, pair.reference, dtype)
        assert verdict.num_different == 0, name
        assert dtype != "float32" or verdict.num_equal == len(asked), name


@pytest.mark.parametrize("name", ["plain, captured", "chain, captured"])
@pytest.mark.parametrize("device", DEVICES)
def test_no_graph_is_captured_again_after_every_size_was_run(device: str, name: str) -> None:
    pair = make_pair(device, "float32" if device == "cpu" else "bfloat16")
    bench = Bench(pair, name, 3, TINY.gamma)
    bench.run(requests(pair), False)
    counts = [recorded(pair, bench)]
    for _ in range(2):
        bench.run(requests(pair), False)
        counts.append(recorded(pair, bench))
    assert counts[0] == counts[1] == counts[2] > 0


def recorded(pair: TextPair, bench: Bench) -> int:
    """Recordings of whole steps, and of forwards of target and drafter where steps are not recorded."""
    runs = [models["captured"]._run for models in (pair.targets, pair.drafters)]
    forwards = sum(run.num_recordings for run in runs if isinstance(run, CapturedDecoder))
    return forwards + bench.engine._runner.num_recordings


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that its watch does not see every operation that waits.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("device", ON_GPU)
@pytest.mark.parametrize("name", list(CONTENDERS))
def test_a_step_never_waits_for_the_device(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first operation to the one look at what it left."""
    pair = make_pair(device, "bfloat16")
    bench = Bench(pair, name, 3, TINY.gamma)
    bench.run(requests(pair), False)
    # Replayed steps launch no kernels of their own.
    monkeypatch.setattr(replay, "MAX_RECORDINGS", 0)
    run_step, calls = replay.run_step, []

    def watched(*given: Any) -> Any:
        calls.append(given)
        with waiting_is_an_error():
            return run_step(*given)

    monkeypatch.setattr(replay, "run_step", watched)
    bench.run(requests(pair), False)
    assert calls


@pytest.mark.parametrize("device", DEVICES)
def test_prompts_made_on_a_stream_of_their_own_are_those_that_are_made_between_steps(device: str) -> None:
    wanted = checks.requests("llava", 24)
    results = []
    for is_ahead in (False, True):
        target = Target(copy.deepcopy(toys.oracle("llava")).to(device), toys.front_end("llava"))
        assert target.capture() == (device == "cuda")
        if is_ahead:
            target.prefetch_prompts()
        drafter = Target(copy.deepcopy(toys.oracle("llava")).to(device), toys.front_end("llava"))
        method = Method(ModelDrafter(drafter, [Full()], target.vocab_size), Chain(2), Exact())
        done = checks.run(Engine(target, method, 3, 160), wanted)
        results.append({key: completion.token_ids for key, completion in done.items()})
    assert results[0] == results[1]


@pytest.mark.parametrize("device", ON_GPU)
def test_the_check_finds_a_step_that_waits_for_the_device(device: str) -> None:
    """The planted fault."""
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device=device).item()


@pytest.mark.parametrize("device", ON_GPU)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_benchmark_runs_at_tiny_sizes(device: str, dtype: str) -> None:
    rows = gpu.measure(replace(TINY, dtype=dtype), torch.device(device), 600.0)
    assert (rows["failed"], rows["skipped"]) == ({}, {})
    assert not [row["withheld"] for row in rows["decoding"]["rows"] if row["withheld"]]
    assert all("tree_kernel_us" in row for row in rows["attention"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ON_GPU)
def test_rounded_layers_have_a_kernel_that_is_right(device: str, kind: str) -> None:
    if reason := why_not(torch.device(device), torch.bfloat16, kind):
        pytest.skip(reason)  # a job that asks for it is refused in these words
    torch.manual_seed(0)
    layer = KINDS[kind](torch.nn.Linear(256, 96, dtype=torch.bfloat16, device=device))
    rows = torch.randn(33, 256, dtype=torch.bfloat16, device=device)
    assert layer.bias is not None
    expected = rows.float() @ layer.dequantised().T + layer.bias.float()
    # Inputs that are rounded to fp8 move by a sixteenth at most, and each by itself.
    allowed = 0.05 if kind == "fp8" else 0.01
    assert float((layer(rows).float() - expected).norm() / expected.norm()) < allowed
    assert torch.equal(layer(rows)[:1], layer(torch.cat([rows[:1], 1e4 * rows[1:]]))[:1])
