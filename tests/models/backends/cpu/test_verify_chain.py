"""A line's end and the walk down it, each in one pass: what torch's own operations give, odd numbers and ties too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding.acceptance.walk import walk_choices
from models.backends.cpu import attention, verify_chain
from models.backends.cpu.build import Library
from models.backends.cpu.verify_chain import CUT, WALK, can_walk
from tests import toys
from tests.decoding import blocks


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    assert attention.LIBRARY.library() is not None
    assert can_walk(torch.zeros(1, 2, 5))


def compare(logits: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
    """Hold the walk to `walk_choices` and the usual formula; returns how many nodes were walked."""
    drafts = blocks.tree(tokens.tolist(), [-1, *range(tokens.shape[1] - 1)], valid.tolist())
    expected = walk_choices(drafts, logits.argmax(dim=-1))
    path, n, own, said, logprobs = WALK(logits, tokens, valid)
    assert n.tolist() == expected.n.tolist()
    assert path.tolist() == expected.path.tolist()
    assert own.tolist() == expected.next.tolist()
    best = logits.argmax(dim=-1)
    wanted = logits.log_softmax(dim=-1).gather(-1, best[:, :, None])[:, :, 0]
    for row, length in enumerate(n.tolist()):
        assert said[row, :length].tolist() == best[row, :length].tolist()
        torch.testing.assert_close(logprobs[row, :length], wanted[row, :length], rtol=1e-5, atol=2e-6, equal_nan=True)
        assert not said[row, length:].any()
        assert not logprobs[row, length:].any()
    return n


@pytest.mark.parametrize("vocabulary", [1, 5, 16, 33, 721, 70000])
@pytest.mark.parametrize("num_nodes", [1, 2, 6])
def test_it_is_torchs_own_walk(vocabulary: int, num_nodes: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary + num_nodes)
    logits = 4 * torch.randn(5, num_nodes, vocabulary, generator=generator)
    tokens = logits.argmax(dim=-1).roll(1, dims=1)
    tokens[1, -1] += 1
    tokens[2] = 0
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[3, num_nodes // 2 + 1 :] = False
    n = compare(logits, tokens, valid)
    assert n[0] == num_nodes
    assert n[3] == min(num_nodes, num_nodes // 2 + 1)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_is_torchs_own_walk_of_any_numbers(data: st.DataObject) -> None:
    b, num_nodes, vocabulary = (data.draw(st.integers(1, most)) for most in (3, 4, 40))
    numbers = st.sampled_from([0.0, 1.0, -1.0, 3.5, -90.0, 200.0, -torch.inf, torch.inf, torch.nan])
    size = b * num_nodes * vocabulary
    drawn = data.draw(st.lists(numbers, min_size=size, max_size=size))
    logits = torch.tensor(drawn, dtype=torch.float32).view(b, num_nodes, vocabulary)
    tokens = logits.argmax(dim=-1).roll(1, dims=1)
    wrong = data.draw(st.lists(st.booleans(), min_size=b * num_nodes, max_size=b * num_nodes))
    tokens += torch.tensor(wrong).view(b, num_nodes)
    cut = data.draw(st.integers(1, num_nodes))
    valid = torch.arange(num_nodes).expand(b, -1) < cut
    compare(logits, tokens, valid.contiguous())


def test_views_of_tokens_are_read_as_they_are() -> None:
    logits = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0))
    wide = torch.zeros(3, 8, dtype=torch.long)
    wide[:, ::2] = logits.argmax(dim=-1).roll(1, dims=1)
    compare(logits, wide[:, ::2], torch.ones(1, 4, dtype=torch.bool).expand(3, -1))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_line_ends_where_torch_ends_it(data: st.DataObject) -> None:
    b, num_nodes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    numbers = st.sampled_from([0.0, 1.0, -90.0, 3e38, -torch.inf, torch.inf, torch.nan, *[2.0] * 20])
    size = b * num_nodes
    best = torch.tensor(data.draw(st.lists(numbers, min_size=size, max_size=size))).view(b, num_nodes)
    best[:, 0] = 0.0
    depths = torch.tensor(data.draw(st.lists(st.integers(0, 8), min_size=2 * b, max_size=2 * b)))[::2]
    valid, num_drafted, has_failed = CUT(best, depths)
    usual = (best.abs() < torch.inf).cumprod(dim=1).bool() & (torch.arange(num_nodes) <= depths[:, None])
    assert valid.equal(usual)
    assert num_drafted.equal(usual.sum(dim=1) - 1)
    assert has_failed.equal(~(best < torch.inf).all(dim=1))


def test_other_logits_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_walk(torch.zeros(1, 2, 5, dtype=torch.bfloat16))
    assert not can_walk(torch.zeros(1, 5, 2).transpose(1, 2))
    monkeypatch.setattr(attention, "LIBRARY", Library((), {}, "never tried"))
    assert not can_walk(torch.zeros(1, 2, 5))


def test_without_a_compiler_torch_walks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "broken.cpp").write_text("this is no program\n")
    broken = Library((tmp_path / "broken.cpp",), {"walk_line": []}, "drafts are compared by torch's own operations")
    monkeypatch.setattr(verify_chain, "LIBRARY", broken)
    assert not can_walk(torch.zeros(1, 2, toys.VOCAB_SIZE))
    assert "compared by torch's own operations" in caplog.text
