"""Load and save EAGLE heads for LlamaGen: `models.heads.eagle` with 2D rotary positions, in LANTERN's file format.

Jang et al. 2024 (arXiv 2410.03355).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.heads.eagle import WEIGHT_NAMES, EagleNetwork, EagleShape, load_eagle, read_eagle_shape, save_eagle
from models.heads.files import head_folder, read_json
from models.llamagen.rotary import GridRotary, join_pairs, split_pairs
from models.llamagen.shape import GptShape
from models.loading.checkpoints import CheckpointError, CheckpointRef

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
    return EagleNetwork(shape, pair_rotary(gpt, shape.llama.head_dim))


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


def read_image_eagle_shape(ref: CheckpointRef, gpt: GptShape) -> EagleShape:
    """Read the shape of a drafter; raises CheckpointError if it does not fit a GPT of shape `gpt`."""
    shape = read_eagle_shape(ref)
    config = read_json(head_folder(ref, WEIGHT_NAMES, weights=False))
    if problem := _misfit(shape, gpt) or other_image(config, gpt):
        raise CheckpointError(f"{ref.path}: {problem}; take a drafter that was trained for this target")
    return shape


def load_image_eagle(ref: CheckpointRef, gpt: GptShape, dtype: str, device: torch.device) -> EagleNetwork:
    """Load a drafter in evaluation mode; `dtype` is a key of `DTYPES`, or "auto" for the stored type.

    The token embedding comes from the file, not from the target.
    """
    shape = read_image_eagle_shape(ref, gpt)
    rotary = pair_rotary(gpt, shape.llama.head_dim)
    return load_eagle(ref, dtype, device, rotary, lambda tensors: _arrange(tensors, shape, split_pairs))


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
    num_heads = {query: shape.llama.num_attention_heads, key: shape.llama.num_key_value_heads}
    return {
        name: order(value, num_heads[name[: len(query)]]) if name.startswith((query, key)) else value
        for name, value in tensors.items()
    }


def _misfit(shape: EagleShape, gpt: GptShape) -> str | None:
    llama = shape.llama
    if llama.hidden_size != gpt.dim:
        return f"it reads states of width {llama.hidden_size}, and the target's are {gpt.dim} wide"
    if llama.vocab_size != gpt.vocab_size:
        return f"it knows {llama.vocab_size} codes, and the target {gpt.vocab_size}"
    if llama.head_dim % 4:
        return f"its heads have {llama.head_dim} dimensions, which rows and columns cannot share in pairs"
    return None


def other_image(config: dict[str, Any], gpt: GptShape) -> str | None:
    """Return why the image fields of `config.json` differ from the target's; None if all present fields are equal."""
    given: dict[str, Any] = {
        name: config[name] for name in ("grid", "num_condition_tokens", "condition") if name in config
    }
    stated = given or _INPUT_TYPES.get(config.get("input_type", ""), {})
    for name, value in stated.items():
        if value != getattr(gpt, name):
            return f"its config.json says {name} is {value!r}, and the target's is {getattr(gpt, name)!r}"
    return None
