"""Every backend returns what the reference backend returns: placement, attention, chains, host copies and forwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding.acceptance.walk import walk_choices
from models.backends.attention import DecoderRunner, attend
from models.backends.base import REFERENCE, Backend, ChainVerdict, TreeNodes
from models.backends.cache import RaggedCache
from models.backends.cpu.attention import LIBRARY
from models.backends.cpu.backend import CpuBackend
from models.backends.cuda.backend import CudaBackend
from models.backends.cuda.graphs import CapturedDecoder
from models.kv.lanes import LaneModel, SlotBatch
from tests import toys
from tests.conformance import checks
from tests.decoding import blocks
from tests.models.backends.cuda.test_graphs import TapeRecorder
from tests.models.plain_tree_kernel import plain

WINDOW = 40
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8
PER_TEST = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class CudaOverHost(CudaBackend):
    """The CUDA backend with CPU tensors: no pinned memory, and recordings that replay operations."""

    copy_to_host = Backend.copy_to_host

    def capture(self, decoder: Any) -> DecoderRunner:
        """See `Backend.capture`."""
        return CapturedDecoder(decoder, TapeRecorder())


@pytest.fixture(params=["cpu", "cuda"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    if request.param == "cpu":
        assert LIBRARY.library() is not None, "the native library is not built"
        yield CpuBackend()
        return
    monkeypatch.setattr("models.backends.cuda.backend.kernel_for", lambda *_: plain)
    yield CudaOverHost()


@st.composite
def trees(draw: st.DrawFn) -> TreeNodes:
    """Nodes `offset` … of random trees over a cache with random contents."""
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_nodes, offset = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(0, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    num_scratch = offset + num_nodes
    is_shared = draw(st.booleans())
    shape = (1 if is_shared else num_rows, num_nodes, num_scratch)
    visible = torch.randint(0, 2, shape, generator=generator).bool()
    own = torch.arange(num_nodes)
    visible[:, own, offset + own] = True  # each node attends to itself
    visible[:, :, offset:] &= torch.ones(num_nodes, num_nodes).tril().bool()
    cache = RaggedCache(num_rows + 1, WINDOW, 1, torch.device("cpu"))
    contents = torch.randn(num_rows + 1, KV_HEADS, WINDOW + 1, HEAD_SIZE, generator=generator).to(dtype)
    every = cache.locate(torch.arange(num_rows + 1), torch.arange(WINDOW + 1).repeat(num_rows + 1, 1))
    cache.write(0, every, contents, -contents)
    return TreeNodes(
        cache=cache,
        rows=torch.arange(num_rows),
        lens=torch.randint(0, WINDOW - num_scratch, (num_rows,), generator=generator),
        delta=torch.randint(-5, 5, (num_rows,), generator=generator),
        depth=torch.randint(0, 5, (1 if is_shared else num_rows, num_nodes), generator=generator).expand(num_rows, -1),
        visible=visible.expand(num_rows, -1, -1),
        numbers=offset + own,
        offset=offset,
        window=WINDOW,
        num_heads=HEADS,
        dtype=dtype,
    )


def attended(backend: Backend, nodes: TreeNodes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions, mixed values, and the cache after one layer on a copy of the cache."""
    keys, values = (tensor.clone() for tensor in nodes.cache.layer(0))
    cache = RaggedCache(len(keys), WINDOW, 1, torch.device("cpu"))
    cache.keys, cache.values = [keys], [values]
    step, positions = backend.place(replace(nodes, cache=cache))
    generator = torch.Generator().manual_seed(7)
    shape = (len(nodes.rows), nodes.visible.shape[1], HEAD_SIZE)
    query = torch.randn(shape[0], HEADS, *shape[1:], generator=generator).to(nodes.dtype)
    key, value = (torch.randn(shape[0], KV_HEADS, *shape[1:], generator=generator).to(nodes.dtype) for _ in range(2))
    layer: Any = SimpleNamespace(layer_idx=0)
    mixed, _ = attend(layer, query, key, value, None, 0.3, step)
    return positions, mixed, keys, values


@PER_TEST
@given(nodes=trees())
def test_trees_are_placed_and_attended(backend: Backend, nodes: TreeNodes) -> None:
    expected_positions, expected, *expected_cache = attended(REFERENCE, nodes)
    positions, mixed, *cache = attended(backend, nodes)
    assert torch.equal(positions, expected_positions)
    eps = torch.finfo(nodes.dtype).eps
    torch.testing.assert_close(mixed, expected, rtol=4 * eps, atol=8 * eps)
    for first, other in zip(cache, expected_cache, strict=True):
        assert torch.equal(first, other)


NUMBERS = [0.0, 1.0, -1.0, 3.5, -90.0, 3e38, -torch.inf, torch.inf, torch.nan]


@PER_TEST
@given(data=st.data())
def test_chains_are_cut(backend: Backend, data: st.DataObject) -> None:
    b, num_nodes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    numbers = st.sampled_from([*NUMBERS, *[2.0] * 20])
    best = torch.tensor(data.draw(st.lists(numbers, min_size=b * num_nodes, max_size=b * num_nodes))).view(b, num_nodes)
    best[:, 0] = 0.0
    depths = torch.tensor(data.draw(st.lists(st.integers(0, 8), min_size=2 * b, max_size=2 * b)))[::2]
    for first, other in zip(backend.cut_chain(best, depths), REFERENCE.cut_chain(best, depths), strict=True):
        assert torch.equal(first, other)


def compare_verdicts(result: ChainVerdict, logits: Tensor, tokens: Tensor, valid: Tensor) -> None:
    expected = REFERENCE.verify_chain(logits, tokens, valid)
    for name in ("choice", "path", "num_taken", "next_token"):
        assert torch.equal(getattr(result, name), getattr(expected, name)), name
    chain = blocks.tree(tokens.tolist(), [-1, *range(tokens.shape[1] - 1)], valid.tolist())
    walked = walk_choices(chain, logits.argmax(dim=-1))
    assert result.path.tolist() == walked.path.tolist()
    assert result.num_taken.tolist() == walked.n.tolist()
    assert result.next_token.tolist() == walked.next.tolist()


@PER_TEST
@given(data=st.data())
def test_chains_of_any_logits_are_verified(backend: Backend, data: st.DataObject) -> None:
    b, num_nodes, vocabulary = (data.draw(st.integers(1, most)) for most in (3, 4, 40))
    size = b * num_nodes * vocabulary
    drawn = data.draw(st.lists(st.sampled_from(NUMBERS), min_size=size, max_size=size))
    logits = torch.tensor(drawn, dtype=torch.float32).view(b, num_nodes, vocabulary)
    tokens = logits.argmax(dim=-1).roll(1, dims=1)
    tokens += torch.tensor(data.draw(st.lists(st.booleans(), min_size=b * num_nodes, max_size=b * num_nodes))).view_as(
        tokens
    )
    valid = (torch.arange(num_nodes) < data.draw(st.integers(1, num_nodes))).expand(b, -1)
    compare_verdicts(backend.verify_chain(logits, tokens, valid), logits, tokens, valid)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 5, 33, 721, 70_000])
def test_chains_of_all_sizes_are_verified(backend: Backend, vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (4 * torch.randn(5, 6, vocabulary, generator=generator)).to(dtype)
    tokens = logits.argmax(dim=-1).roll(1, dims=1)
    tokens[1, -1] += 1
    tokens[2] = 0
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[3, 4:] = False
    wide = torch.zeros(5, 12, dtype=torch.long)
    wide[:, ::2] = tokens
    for given_tokens in (tokens, wide[:, ::2]):
        compare_verdicts(backend.verify_chain(logits, given_tokens, valid), logits, given_tokens, valid)


@PER_TEST
@given(data=st.data())
@example(data=None)
def test_results_are_copied_to_the_host(backend: Backend, data: st.DataObject | None) -> None:
    b, width = (2, 3) if data is None else (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)))
    generator = torch.Generator().manual_seed(b * 10 + width)
    tokens = torch.randint(0, 2**31 - 1, (b, width), generator=generator)
    logprobs = -torch.rand(b, width, generator=generator)
    flags = tokens[:, 0] % 2 == 0
    parts = (tokens, logprobs, None, flags)
    copy = backend.copy_to_host(parts)
    expected = [None if part is None else part.tolist() for part in parts]
    assert copy.read() == expected


def states_of(lanes: LaneModel, target: Any) -> list[Tensor]:
    """States of prefills and tree forwards of several batch sizes and tree sizes."""
    prefixes = [
        target.encode(request.prompt, request.images, request.videos) for request in checks.requests("llava", 4)
    ]
    states = []
    with torch.inference_mode():
        for num_slots, num_nodes in ((4, 3), (2, 1), (1, 4), (4, 3), (3, 5)):
            slots = SlotBatch(torch.arange(num_slots), tuple(range(num_slots)), (1,) * num_slots)
            states.append(lanes.admit(slots, [[prefix] for prefix in prefixes[:num_slots]]).last.clone())
            tokens = torch.arange(num_slots * num_nodes).view(num_slots, num_nodes) % 15 + 5
            depth = torch.arange(num_nodes).expand(num_slots, -1)
            visible = torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril().expand(num_slots, -1, -1)
            states.append(lanes.forward(slots, tokens, depth, visible).clone())
    return states


def test_forwards_are_compiled_or_captured(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target("llava")
    eager = LaneModel(target.decoder, target.head, 4, 1, 200, DecoderRunner(target.decoder))
    expected = states_of(eager, target)
    monkeypatch.setattr("models.kv.lanes.backend_for", lambda _: backend)
    runner = backend.compile(target.decoder) or backend.capture(target.decoder)
    assert runner is not None
    got = states_of(LaneModel(target.decoder, target.head, 4, 1, 200, runner), target)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    del runner, target
    torch._dynamo.reset()
    gc.collect()
