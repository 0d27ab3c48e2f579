"""Tests that attention in two parts equals attention under one mask, for any rows, trees and heads, without
synchronising with the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from models.backends.base import REFERENCE
from models.backends.cuda.backend import CudaBackend
from models.backends.cuda.graphs import CapturedDecoder
from models.backends.cuda.tree_attention import FirstPart, TwoParts, attend_in_parts, first_part, flash, split
from tests import toys
from tests.conformance import checks
from tests.models.backends.cuda.test_graphs import batch, captured, decode_all
from tests.models.plain_first_part import plain
from tests.models.two_ways import BUSH, CAPACITY, CHAIN, FOREST, both_ways, tree


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("parents", [CHAIN, BUSH, FOREST, [-1], [-1, -1, -1]])
@pytest.mark.parametrize("lens", [[7], [3, 21, 12], [0, 5, 0], [0]])
def test_two_parts_equal_one_mask(lens: list[int], parents: list[int], heads: tuple[int, int]) -> None:
    got, expected = both_ways(lens, tree(parents, len(lens)), 0, heads)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("lens", [[3, 21, 12], [0, 5, 33]])
@pytest.mark.parametrize(("first", "last"), [(1, 2), (1, 4), (3, 4), (4, 6)])
def test_a_drafters_level_sees_the_levels_before_it(lens: list[int], first: int, last: int) -> None:
    """Nodes `first` … `last` − 1 of a bush, of which columns up to the last are scratch."""
    visible = tree(BUSH, 3)[:, first:last, :last]
    got, expected = both_ways(lens, visible, first)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


def test_rows_may_have_trees_of_their_own() -> None:
    visible = torch.cat([tree(CHAIN, 1), tree(FOREST, 1), tree([-1, -1, -1, -1], 1)])
    got, expected = both_ways([9, 0, 30], visible, 0)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


def test_masked_scratch_columns_may_be_beyond_the_memory() -> None:
    """A level's mask may be as wide as the widest tree though this row ends before it."""
    visible = torch.zeros(1, 2, 12, dtype=torch.bool)
    visible[0, :, :3] = torch.tensor([[True, True, False], [True, False, True]])
    got, expected = both_ways([34], visible, 1)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parents", [BUSH, [-1]])
def test_half_precision_errs_by_little_more_than_its_rounding(dtype: torch.dtype, parents: list[int]) -> None:
    got, expected = both_ways([3, 21, 12], tree(parents, 3), 0, dtype=dtype)
    # One part is rounded before the merge and the sum after it.
    assert (got.float() - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max()


def test_scores_beyond_what_exp_can_hold_are_merged() -> None:
    for scale in (60.0, 1e-4):
        got, expected = both_ways([3, 21, 12], tree(BUSH, 3), 0, scale=scale)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_single_node_has_no_second_part() -> None:
    memory = torch.zeros(2, 2, CAPACITY + 1, 8)
    alone = split(plain, torch.tensor([4, 9]), torch.ones(2, 1, 1, dtype=torch.bool), 0, memory, 4)
    assert alone.bias is None
    assert alone.scratch is None
    assert alone.lens.tolist() == [[5, 5], [10, 10]]
    # A level of one node sees more scratch columns than its own.
    level = split(plain, torch.tensor([4, 9]), torch.ones(2, 1, 3, dtype=torch.bool), 2, memory, 4)
    assert level.lens.tolist() == [[4, 4], [9, 9]]
    assert level.scratch is not None
    assert level.scratch.tolist() == [[4, 5, 6], [9, 10, 11]]
    assert level.query_starts.tolist() == [0, 2, 4, 6, 8]
    assert level.key_starts.tolist() == [0, 41, 82, 123, 164]


def wrong_merge(query: Tensor, keys: Tensor, values: Tensor, parts: TwoParts, scale: float) -> tuple[Tensor, Tensor]:
    mixed, total = plain(query, keys, values, parts, scale)
    return mixed, total.nan_to_num(neginf=torch.inf)


def shorter(query: Tensor, keys: Tensor, values: Tensor, parts: TwoParts, scale: float) -> tuple[Tensor, Tensor]:
    return plain(query, keys, values, replace(parts, lens=parts.lens - 1), scale)


@pytest.mark.parametrize("fault", [wrong_merge, shorter])
def test_a_wrong_first_part_is_seen(fault: FirstPart) -> None:
    """The planted faults: the kernel's own +inf for a row of nothing, and one column forgotten."""
    got, expected = both_ways([0, 5, 12], tree(BUSH, 3), 0, first=fault)
    assert not torch.allclose(got, expected, atol=1e-3)


# An engine whose memory reports a kernel: the same tokens, plainly and replayed.


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend()
    # A CUDA backend over CPU tensors: two-part attention with a plain kernel, and the reference's host copies.
    monkeypatch.setattr(backend, "copy_to_host", REFERENCE.copy_to_host)
    monkeypatch.setattr("models.backends.cuda.backend.first_part", lambda *_: plain)
    monkeypatch.setattr("models.kv.lanes.backend_for", lambda _: backend)


@pytest.mark.parametrize(("family", "slots"), [("llava", 5), ("llava", 1), ("qwen2_5_vl", 3)])
def test_two_part_attention_gives_the_output_of_masked_attention(
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
        lanes.admit(batch(3), [[target.encode(one.prompt, one.images, one.videos)] for one in requests])
        for _ in range(2):
            lanes.forward(batch(3), tokens[:, :1], depth[:, :1], visible[:, :1, :1])
            states.append(lanes.forward(batch(3), tokens[:, 1:], depth[:, 1:], visible[:, 1:], offset=1))
            lanes.commit(batch(3), torch.tensor([[0, 2]] * 3), torch.tensor([2, 1, 2]))
    return torch.stack(states)


def test_levels_are_replayed_in_two_parts(request: pytest.FixtureRequest) -> None:
    expected = levels(False)
    request.getfixturevalue("kernel")
    for is_recorded in (False, True):
        torch.testing.assert_close(levels(is_recorded), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["lens", "bias", "scratch"])
def test_a_part_that_is_not_copied_into_its_buffer_is_caught(
    part: str, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a recording uses the part's content at capture time."""
    expected = levels(False)
    record, held = CapturedDecoder._record, []

    def with_stale(self: CapturedDecoder, *given: Any) -> Any:
        one = record(self, *given)
        assert one.parts is not None
        stale = getattr(one.parts, part)
        held.append(stale)
        object.__setattr__(one, "parts", replace(one.parts, **{part: None if stale is None else stale.clone()}))
        return one

    monkeypatch.setattr(CapturedDecoder, "_record", with_stale)
    assert not torch.allclose(levels(True), expected, atol=1e-3)


# The kernel itself, as far as a machine without one allows: torch's own account of its shapes, without values.


def by_kernel(num_nodes: int, num_scratch: int, offset: int, heads: tuple[int, int]) -> Tensor:
    """One layer's forward of three rows in bf16."""
    num_heads, num_key_heads = heads
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    keys, values = (torch.zeros(5, num_key_heads, CAPACITY + 1, 64, **options) for _ in range(2))
    query = torch.zeros(3, num_heads, num_nodes, 64, **options)
    key, value = (torch.zeros(3, num_key_heads, num_nodes, 64, **options) for _ in range(2))
    lens = torch.zeros(3, dtype=torch.long)
    visible = torch.ones(3, num_nodes, num_scratch, dtype=torch.bool)
    parts = split(flash, lens, visible, offset, keys, num_heads)
    rows = torch.arange(3)
    return attend_in_parts(query, key, value, rows, keys, values, parts.idle(3), 0.1)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize(("num_nodes", "num_scratch", "offset"), [(1, 1, 0), (6, 6, 0), (2, 5, 3), (1, 3, 2)])
def test_the_kernel_is_called_without_asking_the_device(
    num_nodes: int, num_scratch: int, offset: int, heads: tuple[int, int]
) -> None:
    with FakeTensorMode(), torch.inference_mode():
        mixed = by_kernel(num_nodes, num_scratch, offset, heads)
    assert mixed.shape == (3, heads[0], num_nodes, 64)
    assert mixed.dtype == torch.bfloat16


def test_torch_still_has_the_kernel_with_a_length_per_row() -> None:
    """The operation is not public before torch 2.13; both versions that are used have these arguments."""
    arguments = [one.name for one in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert arguments[:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "return_debug_mask",
    ]  # fmt: skip
    assert {"scale", "seqused_k"} < set(arguments)


def test_memory_without_a_kernel_is_left_to_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)

    def chosen(dtype: torch.dtype, head_size: int, device: str = "cuda", odd: int = 0) -> bool:
        with FakeTensorMode():
            one = torch.zeros(2, 2, 9, head_size, device=device, dtype=dtype)
            other = torch.zeros(2, 2, 9, head_size + odd, device=device, dtype=dtype)
            return first_part([one, one], [one, other]) is flash

    assert chosen(torch.bfloat16, 128)
    assert chosen(torch.float16, 64)
    assert not chosen(torch.float32, 64)
    assert not chosen(torch.bfloat16, 20)
    assert not chosen(torch.bfloat16, 264)
    assert not chosen(torch.bfloat16, 64, odd=8)
    assert not chosen(torch.bfloat16, 64, device="cpu")
    assert first_part([None], [None]) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not chosen(torch.bfloat16, 128)
