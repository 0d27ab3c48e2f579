"""Tests that the tree kernel, which Triton interprets on a CPU, equals the reference under windows, chunks, score caps
and attention sinks."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.backends import pages
from models.backends.attention import attend
from models.backends.base import REFERENCE, TreeNodes
from models.backends.cache import RaggedCache
from models.backends.cuda.backend import CudaBackend
from models.backends.cuda.tree_attention import TreeKernel
from models.backends.mask_rules import PLAIN, LayerRule
from tests.models.attention_cases import BUSH, CHAIN, FOREST, paged, tree
from tests.models.plain_tree_kernel import plain

KERNEL = "models.backends.cuda.tree_kernel"
CAPACITY = 90
RULES = [LayerRule(window=1), LayerRule(window=7), LayerRule(window=40), LayerRule(chunk=8), LayerRule(chunk=40), PLAIN]
TREES = {"chain": CHAIN, "bush": BUSH, "forest": FOREST}
DEPTHS = {"chain": [0, 1, 2, 3], "bush": [0, 1, 1, 2, 2, 2], "forest": [0, 1, 0, 1]}
LENS = [3, 61, 17, 0]
HEADS, KEY_HEADS, HEAD_SIZE = 4, 2, 8


@pytest.fixture(params=["plain", pytest.param("interpreted", marks=pytest.mark.slow), "split"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TreeKernel:
    if request.param == "plain":
        return plain
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the compiled kernel")
    module: Any = importlib.import_module(KERNEL)
    monkeypatch.setattr(module, "MAX_BLOCK_POSITIONS", 16)
    monkeypatch.setattr(module, "SPLITS", ((2, 8),))
    monkeypatch.setattr(module, "_num_processors", lambda _: 6 if request.param == "split" else 0)
    made: TreeKernel = module.tree_attention
    return made


def filled(rule: LayerRule, num_scratch: int, is_paged: bool) -> tuple[RaggedCache, Tensor]:
    """Return a cache of one layer with random contents, and the rows of `LENS`."""
    device = torch.device("cpu")
    cache = RaggedCache(len(LENS) + 1, CAPACITY, 1, device)
    if is_paged:
        cache = paged(len(LENS) + 1, CAPACITY, [length + num_scratch for length in LENS], device)
    cache.rules = (rule,)
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(2, len(LENS), KEY_HEADS, CAPACITY + 1, HEAD_SIZE, generator=generator).mul(1.5)
    rows = torch.arange(len(LENS), 0, -1)
    cache.write(0, cache.locate(rows, torch.arange(CAPACITY + 1).repeat(len(LENS), 1)), *states)
    return cache, rows


def both(
    kernel: TreeKernel,
    monkeypatch: pytest.MonkeyPatch,
    rule: LayerRule,
    shape: str,
    is_paged: bool = False,
    **extras: Any,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (r, N, H, D_h) of the kernel and of the reference."""
    visible, depth = tree(TREES[shape], len(LENS)), torch.tensor([DEPTHS[shape]] * len(LENS))
    num_nodes = depth.shape[1]
    generator = torch.Generator().manual_seed(9)
    query = torch.randn(len(LENS), HEADS, num_nodes, HEAD_SIZE, generator=generator)
    key, value = torch.randn(2, len(LENS), KEY_HEADS, num_nodes, HEAD_SIZE, generator=generator)
    monkeypatch.setattr("models.backends.cuda.backend.kernel_for", lambda *_: kernel)
    layer: Any = SimpleNamespace(layer_idx=0)
    mixed = []
    for backend, pages_used in ((CudaBackend(), is_paged), (REFERENCE, False)):
        cache, rows = filled(rule, num_nodes, pages_used)
        lens, delta = torch.tensor(LENS), torch.zeros(len(LENS), dtype=torch.long)
        sizes = (torch.arange(num_nodes), 0, CAPACITY, HEADS, torch.float32)
        step, _ = backend.place(TreeNodes(cache, rows, lens, delta, depth, visible, *sizes, leading=False))
        mixed.append(attend(layer, query, key, value, None, 0.3, step, **extras)[0])
    return mixed[0], mixed[1]


@pytest.fixture(params=["contiguous", "paged"])
def is_paged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(pages, "PAGE_POSITIONS", 16)
    return bool(request.param == "paged")


@pytest.mark.parametrize("shape", [pytest.param("chain", marks=pytest.mark.slow), "bush", "forest"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_kernel_equals_the_reference(
    kernel: TreeKernel, rule: LayerRule, shape: str, is_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    got, expected = both(kernel, monkeypatch, rule, shape, is_paged)
    torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("extra", ["softcap", "sinks", "both"])
@pytest.mark.parametrize("rule", [PLAIN, LayerRule(window=7)], ids=str)
def test_caps_and_sinks_equal_the_reference(
    kernel: TreeKernel, rule: LayerRule, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras: dict[str, Any] = {} if extra == "sinks" else {"softcap": 1.5}
    if extra != "softcap":
        extras["s_aux"] = torch.tensor([0.3, -2.0, 4.0, 0.0])
    got, expected = both(kernel, monkeypatch, rule, "bush", **extras)
    torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)
    bare, _ = both(kernel, monkeypatch, rule, "bush")
    assert not torch.allclose(got, bare, atol=1e-3)


def test_blocks_before_a_window_are_not_read(kernel: TreeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN at positions before all windows of a block of positions reaches no output: they are never loaded."""
    if kernel is plain:
        pytest.skip("the plain kernel reads all positions")
    rule = LayerRule(window=7)
    clean, _ = both(kernel, monkeypatch, rule, "bush")
    write = RaggedCache.write

    def poisoned(self: RaggedCache, layer: int, index: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        write(self, layer, index, keys, values)
        first = self.values[0]
        assert first is not None
        # Row 3 holds 61 positions, of which its nodes read none before 54; blocks have 16.
        first[3, :, :48] = torch.nan

    monkeypatch.setattr(RaggedCache, "write", poisoned)
    got, _ = both(kernel, monkeypatch, rule, "bush")
    assert torch.equal(got, clean)
