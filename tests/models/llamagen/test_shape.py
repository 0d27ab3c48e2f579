"""Sizes of LlamaGen: the published table, and what no network can have."""

from __future__ import annotations

from typing import Any

import pytest

from models.llamagen.shape import GptShape, VqShape

SIZES: dict[str, Any] = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_dim": 256,
    "vocab_size": 40,
    "grid": 3,
    "condition": "class",
    "num_condition_tokens": 1,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": 0}, "grid must be a positive whole number, not 0"),
        ({"grid": True}, "grid must be a positive whole number, not True"),
        ({"vocab_size": "40"}, "vocab_size must be a positive whole number, not '40'"),
        ({"rms_eps": 0.0}, "rms_eps must be a positive number"),
        ({"rope_base": float("nan")}, "rope_base must be a positive number"),
        ({"num_heads": 5}, "multiple of 4, but dim is 32 and num_heads 5"),
        ({"num_heads": 16}, "multiple of 4, but dim is 32 and num_heads 16"),
        ({"condition": "caption"}, "condition must be text or class, not 'caption'"),
        ({"num_condition_tokens": 120}, "a class is one condition column, not 120"),
    ],
)
def test_sizes_that_no_network_has_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GptShape(**(SIZES | change))


def test_a_vq_model_halves_the_picture_once_per_further_multiplier() -> None:
    assert VqShape(codebook_size=16384).factor == 16
    assert VqShape(codebook_size=16384, multipliers=(1, 2, 2, 4)).factor == 8
    assert VqShape(codebook_size=64, multipliers=(1,)).factor == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 48}, "multiple of 32"),
        ({"multipliers": ()}, "at least one level"),
        ({"multipliers": (1, 0)}, "multipliers must be"),
        ({"multipliers": [1, 2]}, "multipliers must be"),
        ({"code_dim": 8.0}, "code_dim must be a positive whole number"),
    ],
)
def test_vq_sizes_that_no_network_has_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VqShape(**({"codebook_size": 64} | change))
