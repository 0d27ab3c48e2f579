"""Sizes of LlamaGen: the published table, and what no network can have."""

from __future__ import annotations

from typing import Any

import pytest

from models.llamagen.shape import NAMED, GptShape, VqShape, ffn_dim_of

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
    ("name", "ffn_dim", "head_dim"),
    [
        ("B", 2048, 64),
        ("L", 2816, 64),
        ("XL", 3584, 64),
        ("XXL", 4096, 64),
        ("XXXL", 6912, 64),
        ("1B", 5632, 64),
        ("3B", 8704, 100),
        ("7B", 11008, 128),
    ],
)
def test_published_sizes_follow_from_their_names(name: str, ffn_dim: int, head_dim: int) -> None:
    shape = GptShape.named(name, "text", grid=16)
    assert (shape.dim, shape.num_layers, shape.num_heads) == NAMED[name]
    assert shape.ffn_dim == ffn_dim == ffn_dim_of(shape.dim)
    assert shape.head_dim == head_dim
    assert (shape.vocab_size, shape.num_condition_tokens, shape.num_image_tokens) == (16384, 120, 256)
    assert (shape.condition_dim, shape.num_classes, shape.rms_eps, shape.rope_base) == (2048, 1000, 1e-5, 10000.0)
    assert GptShape.named(name, "class", grid=24).num_condition_tokens == 1


def test_a_name_outside_the_table_is_refused_with_the_table() -> None:
    with pytest.raises(ValueError, match="no LlamaGen size 'XS'; known: B, L, XL"):
        GptShape.named("XS", "class", grid=16)


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
