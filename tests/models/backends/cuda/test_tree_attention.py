"""Tests that the tree kernel, which Triton interprets on a CPU, equals attention under one mask, for any rows, trees,
heads and splits."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from models.backends import pages
from models.backends.base import REFERENCE
from models.backends.cuda import tree_attention
from models.backends.cuda.backend import CudaBackend
from models.backends.cuda.graphs import CapturedDecoder
from models.backends.cuda.tree_attention import TreeKernel, kernel_for
from tests import toys
from tests.conformance import checks
from tests.covering import tiers
from tests.models.attention_cases import BUSH, CHAIN, FOREST, both_ways, tree
from tests.models.backends.cuda.test_graphs import batch, captured, decode_all
from tests.models.plain_tree_kernel import plain

KERNEL = "models.backends.cuda.tree_kernel"
LENS = [(values,) for values in ((7,), (3, 21, 12), (0, 5, 0), (0,), (16, 32, 15))]
PARENTS = {"chain": CHAIN, "bush": BUSH, "forest": FOREST, "root": [-1], "roots": [-1, -1, -1]}


@pytest.fixture(scope="module")
def module() -> Any:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the compiled kernel")
    return importlib.import_module(KERNEL)


@pytest.fixture(
    params=["plain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("interpreted", "interpreted, split"))]
)
def run(request: pytest.FixtureRequest, module: Any, monkeypatch: pytest.MonkeyPatch) -> TreeKernel:
    if request.param == "plain":
        return plain
    # 16 positions per block, so that short rows have several.
    monkeypatch.setattr(module, "MAX_BLOCK_POSITIONS", 16)
    monkeypatch.setattr(module, "SPLITS", ((2, 8),))
    monkeypatch.setattr(module, "_num_processors", lambda _: 6 if "split" in request.param else 0)
    kernel: TreeKernel = module.tree_attention
    return kernel


@pytest.fixture(params=["contiguous", "paged"])
def is_paged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    # Two and a half pages per row; a row's scratch positions cross a border.
    monkeypatch.setattr(pages, "PAGE_POSITIONS", 16)
    return bool(request.param == "paged")


@tiers("lens, parents, heads", LENS, list(PARENTS), [((4, 4),), ((4, 2),), ((6, 1),)])
def test_the_kernel_equals_one_mask(
    run: TreeKernel, is_paged: bool, lens: list[int], parents: str, heads: tuple[int, int]
) -> None:
    got, expected = both_ways(run, list(lens), tree(PARENTS[parents], len(lens)), heads=heads, is_paged=is_paged)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("lens", [[3, 21, 12], [0, 5, 33]])
@pytest.mark.parametrize(("first", "last"), [(1, 2), (1, 4), (3, 4), (4, 6)])
def test_a_drafters_level_sees_the_levels_before_it(
    run: TreeKernel, is_paged: bool, lens: list[int], first: int, last: int
) -> None:
    """Nodes `first` … `last` − 1 of a bush, of which columns up to the last are scratch."""
    visible = tree(BUSH, 3)[:, first:last, :last]
    got, expected = both_ways(run, lens, visible, first, is_paged=is_paged)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_kernel_equals_masked_attention_for_any_mask(run: TreeKernel, data: st.DataObject) -> None:
    num_rows, num_nodes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    offset = data.draw(st.integers(0, 5))
    num_scratch = offset + num_nodes + data.draw(st.integers(0, 3))
    lens = data.draw(st.lists(st.integers(0, 90 - num_scratch), min_size=num_rows, max_size=num_rows))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 20)))
    visible = torch.rand(num_rows, num_nodes, num_scratch, generator=generator) < 0.4
    # Every node sees itself.
    visible[:, torch.arange(num_nodes), offset + torch.arange(num_nodes)] = True
    heads = data.draw(st.sampled_from([(2, 2), (4, 2), (10, 2)]))
    size = data.draw(st.sampled_from([8, 20, 32]))
    got, expected = both_ways(run, lens, visible, offset, heads, scale=size**-0.5, head_size=size, capacity=90)
    torch.testing.assert_close(got, expected, rtol=5e-6, atol=5e-6)


def test_rows_may_have_trees_of_their_own(run: TreeKernel) -> None:
    visible = torch.cat([tree(CHAIN, 1), tree(FOREST, 1), tree([-1, -1, -1, -1], 1)])
    got, expected = both_ways(run, [9, 0, 30], visible)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


def test_masked_scratch_positions_may_be_outside_the_kv_cache(run: TreeKernel) -> None:
    """A level's mask may be as wide as the widest tree though this row ends before it."""
    visible = torch.zeros(1, 2, 12, dtype=torch.bool)
    visible[0, :, :3] = torch.tensor([[True, True, False], [True, False, True]])
    got, expected = both_ways(run, [34], visible, 1)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("parents", [BUSH, [-1]])
def test_half_precision_errs_by_little_more_than_its_rounding(run: TreeKernel, parents: list[int]) -> None:
    got, expected = both_ways(run, [3, 21, 12], tree(parents, 3), dtype=torch.float16)
    # Weights are rounded before the product with V, and the sum after it.
    assert (got.float() - expected).abs().max() <= 2 * torch.finfo(torch.float16).eps * expected.abs().max()


def test_scores_that_overflow_exp_give_finite_outputs(run: TreeKernel) -> None:
    for scale in (60.0, 1e-4):
        got, expected = both_ways(run, [3, 21, 12], tree(BUSH, 3), scale=scale)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_nodes_without_visible_positions_get_zeros(run: TreeKernel) -> None:
    """Unused rows of a captured step."""
    visible = torch.zeros(2, 3, 3, dtype=torch.bool)
    got, _ = both_ways(run, [0, 0], visible)
    assert got.eq(0).all()


def shorter(*given: Any) -> Tensor:
    query, keys, values, rows, lens, visible, scale = given
    return plain(query, keys, values, rows, lens - 1, visible, scale)


def first_rows(*given: Any) -> Tensor:
    query, keys, values, rows, lens, visible, scale = given
    return plain(query, keys, values, rows.sort(dim=0).values, lens, visible, scale)


def causal(*given: Any) -> Tensor:
    query, keys, values, rows, lens, visible, scale = given
    return plain(query, keys, values, rows, lens, torch.ones_like(visible).tril(), scale)


@pytest.mark.parametrize("fault", [shorter, first_rows, causal])
def test_a_wrong_kernel_is_found(fault: TreeKernel) -> None:
    """The planted faults: one position forgotten, rows in order, and a tree read as a chain."""
    got, expected = both_ways(fault, [9, 5, 12], tree(BUSH, 3))
    assert not torch.allclose(got, expected, atol=1e-3)


def test_positions_are_split_only_if_rows_and_heads_do_not_fill_the_device(module: Any) -> None:
    (few, short), (many, long) = module.SPLITS
    splits = module.num_splits_of
    assert splits(64 * 64, 25_000, 132) == 1
    assert splits(4, 100_000, 132) == module.MAX_SPLITS
    assert splits(4, 2 * short, 132) == 2
    assert splits(4, 2 * short - 1, 132) == splits(4, 1, 132) == 1
    # A device whose processors have `few` programs each is divided for long contexts only.
    assert splits(few * 132, 2 * long - 1, 132) == 1
    assert splits(few * 132, 2 * long, 132) == 2
    assert splits(many * 132, 100_000, 132) == 1


# An engine whose memory reports a kernel: the same tokens, plainly and replayed.


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend()
    # A CUDA backend over CPU tensors: a plain tree kernel, and the reference's host copies.
    for name in ("copy_to_host", "step_recorder"):
        monkeypatch.setattr(backend, name, getattr(REFERENCE, name))
    monkeypatch.setattr("models.backends.cuda.backend.kernel_for", lambda *_: plain)
    monkeypatch.setattr("models.kv.lanes.backend_for", lambda _: backend)


@pytest.mark.slow_cases("llava-5")
@pytest.mark.parametrize(("family", "slots"), [("llava", 5), ("llava", 1), ("qwen2_5_vl", 3)])
def test_a_tree_kernel_gives_the_output_of_masked_attention(
    family: str, slots: int, request: pytest.FixtureRequest
) -> None:
    expected, _ = decode_all(family, slots, False)
    request.getfixturevalue("kernel")
    got, _ = decode_all(family, slots, False)
    assert got == expected
    replayed, counts = decode_all(family, slots, True)
    assert replayed == expected
    assert all(count > 0 for count in counts), counts


def levels(is_recorded: bool) -> Tensor:
    """States of a drafter's second levels at three rows, two steps, each with another number of columns committed."""
    target = toys.target("llava")
    if is_recorded:
        captured(target)
    lanes = target.lanes(3, 1, 64)
    requests = checks.requests("llava", 3)
    tokens, depth = torch.tensor([[7, 8, 9]] * 3), torch.tensor([[0, 1, 1]] * 3)
    visible = tree([-1, 0, 0], 3)
    states = []
    with torch.inference_mode():
        lanes.admit(batch(3), [[target.encode(request.prompt, request.images, request.videos)] for request in requests])
        for _ in range(2):
            lanes.forward(batch(3), tokens[:, :1], depth[:, :1], visible[:, :1, :1])
            states.append(lanes.forward(batch(3), tokens[:, 1:], depth[:, 1:], visible[:, 1:], offset=1))
            lanes.commit(batch(3), torch.tensor([[0, 2]] * 3), torch.tensor([2, 1, 2]))
    return torch.stack(states)


def test_levels_are_replayed(request: pytest.FixtureRequest) -> None:
    expected = levels(False)
    request.getfixturevalue("kernel")
    for is_recorded in (False, True):
        torch.testing.assert_close(levels(is_recorded), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["lens", "visible"])
def test_a_part_that_is_not_copied_into_its_buffer_is_caught(
    part: str, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a recording uses the part's content at capture time."""
    expected = levels(False)
    record, held = CapturedDecoder._record, []

    def with_stale(self: CapturedDecoder, *given: Any) -> Any:
        recording = record(self, *given)
        assert recording.inputs.trees is not None
        stale = getattr(recording.inputs.trees, part)
        held.append(stale)
        object.__setattr__(recording.inputs, "trees", replace(recording.inputs.trees, **{part: stale.clone()}))
        return recording

    monkeypatch.setattr(CapturedDecoder, "_record", with_stale)
    assert not torch.allclose(levels(True), expected, atol=1e-3)


# The operation in a compiled graph, and the choice of the kernel.


def test_the_operation_has_the_kernels_shape(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation, which the compiler does not look into; its declared output is compared with the real one."""
    tree_attention._load.cache_clear()
    kernel = tree_attention._load()
    assert kernel is not None
    operation: Any = torch.ops.draftfleet.tree_attention
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 4, 3, 16, generator=generator)
    memory = torch.randn(3, 2, 21, 16, generator=generator)
    lens, visible = torch.tensor([4, 9], dtype=torch.int32), torch.ones(2, 3, 3, dtype=torch.uint8)
    given = (query, memory, memory, torch.arange(2, dtype=torch.int32)[:, None], lens, visible, 0.25)
    torch.library.opcheck(operation.default, given, test_utils=("test_schema", "test_faketensor"))
    torch.testing.assert_close(operation(*given), plain(*given), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(kernel(*given), plain(*given), rtol=2e-6, atol=2e-6)


def test_without_triton_attention_uses_the_mask(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree_attention._load.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    assert tree_attention._load() is None
    assert "uses a mask, which is slower" in caplog.text
    tree_attention._load.cache_clear()


def test_a_kv_cache_without_a_kernel_uses_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(tree_attention, "_load", lambda: plain)

    def chosen(dtype: torch.dtype, head_size: int, device: str = "cuda", odd: int = 0) -> bool:
        with FakeTensorMode():
            keys = torch.zeros(2, 2, 9, head_size, device=device, dtype=dtype)
            other = torch.zeros(2, 2, 9, head_size + odd, device=device, dtype=dtype)
            return kernel_for([keys, keys], [keys, other]) is plain

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert chosen(dtype, 128)
    assert chosen(torch.bfloat16, 80)
    assert not chosen(torch.float64, 64)
    assert chosen(torch.float16, 256)
    assert not chosen(torch.bfloat16, 257)
    assert not chosen(torch.float32, 129)
    assert not chosen(torch.bfloat16, 64, odd=8)
    assert not chosen(torch.bfloat16, 64, device="cpu")
    assert kernel_for([None], [None]) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not chosen(torch.bfloat16, 128)
