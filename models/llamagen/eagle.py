"""EAGLE and EAGLE-3 heads for LlamaGen: the networks of `models.heads` with 2D rotary positions.

EAGLE-1/2 heads have LANTERN's file format.

Jang et al. 2024 (arXiv 2410.03355).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.heads.config import HeadConfig
from models.heads.eagle import EagleNetwork, EagleShape
from models.heads.eagle3 import Eagle3Shape
from models.heads.formats import EAGLE, MEDUSA
from models.heads.loader import HeadFormat
from models.heads.writer import save_eagle
from models.llamagen.rotary import GridRotary, join_pairs, split_pairs
from models.llamagen.shape import GptShape
from models.loading.checkpoints import CheckpointError

# LANTERN's `input_type` determines condition and grid.
_INPUT_TYPES: dict[str, dict[str, Any]] = {
    "t2i": {"condition": "text", "grid": 16},
    "t2i2": {"condition": "text", "grid": 32},
    "c2i": {"condition": "class", "grid": 24},
}


def image_eagle(shape: EagleShape, gpt: GptShape) -> EagleNetwork:
    """Create an initialized network that drafts for a GPT of shape `gpt`; raises ValueError if it does not fit."""
    if problem := _misfit(shape, gpt):
        raise ValueError(problem)
    return EagleNetwork(shape, pair_rotary(gpt, shape.layers.head_dim))


def image_eagle_shape(gpt: GptShape) -> EagleShape:
    """Return the shape of published drafters for a GPT of shape `gpt`: one of its layers, with norm epsilon 1e-6."""
    config = {
        "vocab_size": gpt.vocab_size,
        "hidden_size": gpt.dim,
        "intermediate_size": gpt.ffn_dim,
        "num_attention_heads": gpt.num_heads,
        "head_dim": gpt.head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": gpt.num_condition_tokens + gpt.num_image_tokens,
    }
    return EagleShape.of(config, "the drafter")


def image_head(kind: HeadFormat[Any, Any], gpt: GptShape) -> HeadFormat[Any, Any]:
    """Return the format of heads of a `kind` for a GPT of shape `gpt`; Medusa heads have one for all targets.

    That of EAGLE heads refuses those that do not fit the GPT, or have other images. The weights of EAGLE-1/2 have
    LANTERN's order.
    """
    if kind is MEDUSA:
        return kind

    def read(config: HeadConfig, num_target_layers: int) -> Any:
        shape = kind.read(config, num_target_layers)
        if problem := _misfit(shape, gpt) or _other_image(config, gpt):
            raise CheckpointError(f"{config.path}: {problem}; take a drafter that was trained for this target")
        return shape

    def arrange(shape: EagleShape, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return _arrange(tensors, shape, split_pairs)

    network = lambda shape: kind.network(shape, pair_rotary(gpt, shape.layers.head_dim))  # noqa: E731
    return replace(kind, read=read, network=network, arrange=arrange if kind is EAGLE else kind.arrange)


def save_image_eagle(network: EagleNetwork, gpt: GptShape, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `pytorch_model.bin` in LANTERN's weight order, with the image fields of `gpt`."""
    extra = image_fields(gpt)
    save_eagle(network, folder, dtype, lambda tensors: _arrange(tensors, network.shape, join_pairs), extra)


def image_fields(gpt: GptShape) -> dict[str, Any]:
    """Return the fields of a head's `config.json` that describe the target's images."""
    return {"grid": gpt.grid, "num_condition_tokens": gpt.num_condition_tokens, "condition": gpt.condition}


def pair_rotary(gpt: GptShape, head_dim: int) -> GridRotary:
    """Return the rotary embedding of pairs: that of feature t and token t + 1 is the rotation of t + 1."""
    return GridRotary(head_dim, gpt.grid, gpt.num_condition_tokens - 1, gpt.rope_base)


def _arrange(
    tensors: dict[str, Tensor], shape: EagleShape, order: Callable[[Tensor, int], Tensor]
) -> dict[str, Tensor]:
    """Reorder the rotary pairs of query and key projections with `order`; other tensors are unchanged."""
    query, key = "layers.0.self_attn.q_proj.", "layers.0.self_attn.k_proj."
    num_heads = {query: shape.layers.num_attention_heads, key: shape.layers.num_key_value_heads}
    return {
        name: order(value, num_heads[name[: len(query)]]) if name.startswith((query, key)) else value
        for name, value in tensors.items()
    }


def _misfit(shape: EagleShape | Eagle3Shape, gpt: GptShape) -> str | None:
    if shape.state_size != gpt.dim:
        return f"it reads states of width {shape.state_size}, and the target's are {gpt.dim} wide"
    if shape.vocab_size != gpt.vocab_size:
        return f"it knows {shape.vocab_size} codes, and the target {gpt.vocab_size}"
    if shape.layers.head_dim % 4:
        return f"its heads have {shape.layers.head_dim} dimensions, which rows and columns cannot share in pairs"
    return None


def _other_image(config: HeadConfig, gpt: GptShape) -> str | None:
    """Return why the image fields of `config.json` differ from the target's; None if all present fields are equal."""
    given = {name: config[name] for name in image_fields(gpt) if name in config}
    stated = given or _INPUT_TYPES.get(config.get("input_type", ""), {})
    for name, value in stated.items():
        if value != getattr(gpt, name):
            return f"its config.json says {name} is {value!r}, and the target's is {getattr(gpt, name)!r}"
    return None
