"""How published LlamaGen weights are named, and the way from their names to the GPT's and back.

Two layouts: LlamaGen's own (`tok_embeddings.weight`, query, key and value fused) and the LlamaForCausalLM names of
LANTERN's files. Both keep a head's rotary pairs side by side. Owns names, shapes and what follows from them; reads no
files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from models.llamagen.rotary import join_pairs, split_pairs
from models.llamagen.shape import NAMED, GptShape
from models.loading.checkpoints import CheckpointError

OFFICIAL, LANTERN = "LlamaGen", "LANTERN"

Shapes = Mapping[str, tuple[int, ...]]

# Names inside one layer: LlamaGen's → transformers'. `attention.wqkv` contains three projections.
_IN_LAYER = {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_FUSED = "attention.wqkv"
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Names outside the layers: LlamaGen's → LANTERN's, and the GPT's.
_OUTSIDE = {
    "tok_embeddings.weight": ("model.embed_tokens.weight", "embed_tokens.weight"),
    "norm.weight": ("model.norm.weight", "norm.weight"),
    "output.weight": ("lm_head.weight", "output.weight"),
}
_CLASS = "cls_embedding.embedding_table.weight"
_NULL = "cls_embedding.uncond_embedding"
_TEXT = {
    "cls_embedding.cap_proj.fc1.weight": "condition.fc1.weight",
    "cls_embedding.cap_proj.fc2.weight": "condition.fc2.weight",
    _NULL: "condition.uncond_embedding",
}
_STRAY = "freqs_cis"
"""A table that old files carry beside the weights; it follows from the sizes."""


def layout_of(names: Any) -> str | None:
    """Which layout these names are of; None for neither."""
    if "tok_embeddings.weight" in names:
        return OFFICIAL
    return LANTERN if "model.embed_tokens.weight" in names else None


def is_stray(name: str) -> bool:
    """Whether a tensor is a redundant buffer of old files."""
    return name == _STRAY or name.endswith((f".{_STRAY}", "rotary_emb.inv_freq"))


def expected_shapes(shape: GptShape, layout: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor of a model in `layout`."""
    dim, ffn = shape.dim, shape.ffn_dim
    inside = {
        "attention.wo": (dim, dim),
        "feed_forward.w1": (ffn, dim),
        "feed_forward.w2": (dim, ffn),
        "feed_forward.w3": (ffn, dim),
        "attention_norm": (dim,),
        "ffn_norm": (dim,),
    }
    outside = {
        "tok_embeddings.weight": (shape.vocab_size, dim),
        "norm.weight": (dim,),
        "output.weight": (shape.vocab_size, dim),
    }
    condition: dict[str, tuple[int, ...]] = {_CLASS: (shape.num_classes + 1, dim)}
    if shape.condition == "text":
        condition = {
            "cls_embedding.cap_proj.fc1.weight": (dim, shape.condition_dim),
            "cls_embedding.cap_proj.fc2.weight": (dim, dim),
            _NULL: (shape.num_condition_tokens, shape.condition_dim),
        }
    found: dict[str, tuple[int, ...]] = {}
    if layout == OFFICIAL:
        found |= outside | condition
        for index in range(shape.num_layers):
            found[f"layers.{index}.{_FUSED}.weight"] = (3 * dim, dim)
            found |= {f"layers.{index}.{name}.weight": size for name, size in inside.items()}
        return found
    found |= {_OUTSIDE[name][0]: size for name, size in outside.items()}
    found |= {f"model.{name}": size for name, size in condition.items()}
    for index in range(shape.num_layers):
        found |= {f"model.layers.{index}.{name}.weight": (dim, dim) for name in _PROJECTIONS}
        found |= {f"model.layers.{index}.{_IN_LAYER[name]}.weight": size for name, size in inside.items()}
    return found


def to_gpt(tensors: dict[str, Tensor], shape: GptShape, layout: str) -> dict[str, Tensor]:
    """Tensors under a layout's names → the GPT's state dict; `tensors` is emptied on the way, to hold each once."""
    found: dict[str, Tensor] = {}
    outside = {names[0] if layout == LANTERN else name: names[1] for name, names in _OUTSIDE.items()}
    for name in list(tensors):
        value = tensors.pop(name)
        bare = name.removeprefix("model.") if layout == LANTERN else name
        if name in outside:
            found[outside[name]] = value
        elif bare == _CLASS:
            found["condition.weight"] = value
        elif bare in _TEXT:
            found[_TEXT[bare]] = value
        else:
            found |= _layer_to_gpt(bare, value, shape.num_heads)
    return found


def _layer_to_gpt(name: str, value: Tensor, num_heads: int) -> dict[str, Tensor]:
    _, index, rest = name.split(".", 2)
    inside, layer = rest.removesuffix(".weight"), f"layers.{index}"
    if inside == _FUSED:
        query, key, mixed = value.chunk(3)
        # A copy, or the value projection would keep the whole fused matrix alive.
        parts = dict(zip(_PROJECTIONS, (query, key, mixed.clone()), strict=True))
    else:
        parts = {_IN_LAYER.get(inside, inside): value}
    return {
        f"{layer}.{name}.weight": split_pairs(part, num_heads) if name in _PROJECTIONS[:2] else part
        for name, part in parts.items()
    }


def to_official(state: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """The GPT's state dict → tensors under LlamaGen's own names, in its order of rotary pairs."""
    names = {ours: name for name, (_, ours) in _OUTSIDE.items()} | {ours: name for name, ours in _TEXT.items()}
    names["condition.weight"] = _CLASS
    in_layer = {ours: name for name, ours in _IN_LAYER.items()}
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in names:
            found[names[name]] = value
            continue
        _, index, rest = name.split(".", 2)
        inside, layer = rest.removesuffix(".weight"), f"layers.{index}"
        if inside in in_layer:
            found[f"{layer}.{in_layer[inside]}.weight"] = value
        elif inside == _PROJECTIONS[0]:
            query, key, mixed = (state[f"{layer}.{each}.weight"] for each in _PROJECTIONS)
            found[f"{layer}.{_FUSED}.weight"] = torch.cat(
                [join_pairs(query, num_heads), join_pairs(key, num_heads), mixed]
            )
    return found


def sizes_of(found: Shapes, layout: str, where: str) -> dict[str, Any]:
    """Fields of `GptShape` from names and shapes; `num_heads` and `grid` only if they can be inferred.

    Raises:
        CheckpointError: a tensor that determines a size is missing or misshapen.
    """
    prefix = "model." if layout == LANTERN else ""
    inner = "layers.0.mlp.gate_proj.weight" if layout == LANTERN else "layers.0.feed_forward.w1.weight"
    embedding = f"{prefix}embed_tokens.weight" if layout == LANTERN else "tok_embeddings.weight"
    numbers = [re.fullmatch(rf"{re.escape(prefix)}layers\.(\d+)\..*", name) for name in found]
    layers = {int(number[1]) for number in numbers if number}
    vocab_size, dim = _matrix(found, embedding, where)
    sizes: dict[str, Any] = {
        "dim": dim,
        "vocab_size": vocab_size,
        "num_layers": len(layers),
        "ffn_dim": _matrix(found, prefix + inner, where)[0],
    }
    if prefix + _NULL in found:
        columns, condition_dim = _matrix(found, prefix + _NULL, where)
        sizes |= {"condition": "text", "num_condition_tokens": columns, "condition_dim": condition_dim}
    else:
        rows, _ = _matrix(found, prefix + _CLASS, where)
        sizes |= {"condition": "class", "num_condition_tokens": 1, "num_classes": rows - 1}
    for size, num_layers, num_heads in NAMED.values():
        if (size, num_layers) == (dim, len(layers)):
            sizes["num_heads"] = num_heads
    return sizes | _read_stray(found, sizes)


def _read_stray(found: Shapes, sizes: dict[str, Any]) -> dict[str, Any]:
    """Grid and heads from a rotary table (condition + grid², D_h / 2, 2) of an old file."""
    table = found.get(_STRAY, ())
    if len(table) != 3 or table[2] != 2 or table[1] < 1:
        return {}
    side = round(max(0, table[0] - sizes["num_condition_tokens"]) ** 0.5)
    if not side or side * side + sizes["num_condition_tokens"] != table[0] or sizes["dim"] % (2 * table[1]):
        return {}
    return {"grid": side, "num_heads": sizes["dim"] // (2 * table[1])}


def _matrix(found: Shapes, name: str, where: str) -> tuple[int, int]:
    size = found.get(name)
    if size is None:
        raise CheckpointError(f"{where}: {name} is missing; is the file complete?")
    if len(size) != 2 or min(size) < 1:
        raise CheckpointError(f"{where}: {name} has shape {list(size)}, not that of a matrix")
    return size[0], size[1]
