"""An output layer of some tokens, alone and packed, and the file that lists tokens."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from models.backends.cpu import packing
from models.backends.cpu.compiled import PackedHead, pack_head
from models.backends.cpu.packing import can_pack
from models.loading.vocabulary import SlicedHead, TokenCount, VocabularyError, read_tokens, write_tokens

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="no packed kernels here")


def layer(bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 20, bias=bias).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_tokens_of_a_slice_have_the_logits_of_the_full_layer_and_others_minus_infinity(
    bias: bool, dtype: torch.dtype
) -> None:
    whole = layer(bias, dtype)
    sliced = SlicedHead.of(whole, [7, 3, 19, 3], vocab_size=25)
    hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits = sliced(hidden)
    assert logits.dtype == torch.float32
    assert logits.shape == (2, 3, 25)
    kept = torch.tensor([3, 7, 19])
    torch.testing.assert_close(logits[..., kept], whole(hidden)[..., kept].float())
    others = torch.ones(25, dtype=torch.bool).index_fill(0, kept, False)
    assert bool((logits[..., others] == -torch.inf).all())
    assert sum(parameter.numel() for parameter in sliced.parameters()) == 3 * (8 + bias)


def test_logits_of_a_layer_narrower_than_the_vocabulary_have_the_indices_of_their_tokens() -> None:
    whole = layer(False)
    logits = SlicedHead.of(whole, range(20), vocab_size=30)(torch.ones(8))
    torch.testing.assert_close(logits[:20], whole(torch.ones(8)))
    assert logits[20:].tolist() == [-torch.inf] * 10


@pytest.mark.parametrize(("ids", "vocab_size"), [([], 20), ([20], 30), ([5], 5), ([-1], 20)])
def test_unknown_tokens_are_an_error_of_the_caller(ids: list[int], vocab_size: int) -> None:
    with pytest.raises(AssertionError):
        SlicedHead.of(layer(False), ids, vocab_size)


@needs_packing
def test_a_packed_slice_gives_equal_logits_and_is_freed_with_its_layer() -> None:
    sliced = SlicedHead.of(layer(True), range(0, 20, 3), vocab_size=20)
    address = sliced.rows.weight.data_ptr()
    packed = pack_head(sliced)
    assert isinstance(packed, SlicedHead)
    assert isinstance(packed.rows, PackedHead)
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(packed(hidden), sliced(hidden))
    assert address in packing._packed
    del packed, sliced
    gc.collect()
    assert address not in packing._packed


def test_a_list_comes_back_by_falling_count_with_the_tokens_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    tokens = [TokenCount(5, "Ġa", 2), TokenCount(900, '"\n', 7), TokenCount(4, "é", 2)]
    write_tokens(file, tokens, "three tokens")
    assert read_tokens(str(file)) == [TokenCount(900, '"\n', 7), TokenCount(4, "é", 2), TokenCount(5, "Ġa", 2)]
    assert json.loads(file.read_text())["counted"] == "three tokens"
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.json"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[1, 2]", "it holds no tokens"),
        ('{"tokens": []}', "it holds no tokens"),
        ('{"tokens": [[1, "a", 2], [1, "b", 2]]}', "it names a token id twice"),
        ('{"tokens": [[1, "a", 2], [-1, "b", 2]]}', r"tokens\[1\] is \[-1, \"b\", 2\], not \[id, token, count\]"),
        ('{"tokens": [[1, "a"]]}', r"tokens\[0\]"),
        ('{"tokens": [[1.0, "a", 2]]}', r"tokens\[0\]"),
        ('{"tokens": [17]}', r"tokens\[0\] is 17"),
    ],
)
def test_a_file_that_is_no_token_list_is_refused_by_name(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(text)
    with pytest.raises(VocabularyError, match=reason) as caught:
        read_tokens(str(file))
    assert str(caught.value).startswith(f"{file}: ")


def test_a_missing_list_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"gone\.json: it cannot be read: No such file"):
        read_tokens(str(tmp_path / "gone.json"))
    with pytest.raises(VocabularyError, match="it cannot be read: Is a directory"):
        read_tokens(str(tmp_path))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(VocabularyError, match="it is no JSON"):
        read_tokens(str(file))
