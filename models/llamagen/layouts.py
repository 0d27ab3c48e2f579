"""Convert tensor names and layouts of published LlamaGen weights to and from those of `models.llamagen.gpt`.

There are two layouts: LlamaGen's own (`tok_embeddings.weight`, fused query, key and value) and the LlamaForCausalLM
names of LANTERN's files. Both interleave the rotary pairs of a head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from models.heads.files import shapes_of
from models.llamagen.gpt import Gpt
from models.llamagen.rotary import join_pairs, split_pairs
from models.llamagen.shape import PUBLISHED_HEADS, GptShape
from models.loading.checkpoints import CheckpointError

OFFICIAL, LANTERN = "LlamaGen", "LANTERN"

Shapes = Mapping[str, tuple[int, ...]]

# Names inside one layer: the GPT's, which are LANTERN's → LlamaGen's. `attention.wqkv` contains three projections.
_IN_LAYER = {
    "self_attn.q_proj": "attention.wqkv",
    "self_attn.k_proj": "attention.wqkv",
    "self_attn.v_proj": "attention.wqkv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TURNED = ("q_proj.weight", "k_proj.weight")
# Names outside the layers: the GPT's → LlamaGen's and LANTERN's.
_OUTSIDE = {
    "embed_tokens.weight": ("tok_embeddings.weight", "model.embed_tokens.weight"),
    "norm.weight": ("norm.weight", "model.norm.weight"),
    "output.weight": ("output.weight", "lm_head.weight"),
}
_CLASS, _NULL = "cls_embedding.embedding_table.weight", "cls_embedding.uncond_embedding"
_CONDITION = {
    "class": {"condition.weight": _CLASS},
    "text": {
        "condition.uncond_embedding": _NULL,
        "condition.fc1.weight": "cls_embedding.cap_proj.fc1.weight",
        "condition.fc2.weight": "cls_embedding.cap_proj.fc2.weight",
    },
}


def layout_of(names: Any) -> str | None:
    """Return the layout of these tensor names; None if they have neither layout."""
    if "tok_embeddings.weight" in names:
        return OFFICIAL
    return LANTERN if "model.embed_tokens.weight" in names else None


def is_stray(name: str) -> bool:
    """Return whether a tensor is a redundant buffer of old files, which is computed from the sizes."""
    return name == "freqs_cis" or name.endswith((".freqs_cis", "rotary_emb.inv_freq"))


def expected_shapes(shape: GptShape, layout: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all tensors of a model in `layout`."""
    with torch.device("meta"):
        return shapes_of(from_gpt(Gpt(shape).state_dict(), shape, layout))


def _names(shape: GptShape, layout: str) -> dict[str, str]:
    """Return the layout's name for each of the GPT's names; all parts of a fused matrix map to its name."""
    prefix = "model." if layout == LANTERN else ""
    names = {ours: both[layout == LANTERN] for ours, both in _OUTSIDE.items()}
    names |= {ours: prefix + theirs for ours, theirs in _CONDITION[shape.condition].items()}
    for index in range(shape.num_layers):
        for ours, official in _IN_LAYER.items():
            theirs = ours if layout == LANTERN else official
            names[f"layers.{index}.{ours}.weight"] = f"{prefix}layers.{index}.{theirs}.weight"
    return names


def to_gpt(tensors: dict[str, Tensor], shape: GptShape, layout: str) -> dict[str, Tensor]:
    """Convert tensors of a layout to the GPT's state dict; `tensors` is emptied to save memory."""
    parts: dict[str, list[str]] = {}
    for ours, theirs in _names(shape, layout).items():
        parts.setdefault(theirs, []).append(ours)
    state: dict[str, Tensor] = {}
    for theirs, names in parts.items():
        for name, value in zip(names, tensors.pop(theirs).chunk(len(names)), strict=True):
            if name.endswith(_TURNED):
                value = split_pairs(value, shape.num_heads)
            # A copy, or the value projection would keep the whole fused matrix alive.
            state[name] = value.clone() if name.endswith("v_proj.weight") else value
    return state


def from_gpt(state: Mapping[str, Tensor], shape: GptShape, layout: str = OFFICIAL) -> dict[str, Tensor]:
    """Convert the GPT's state dict to tensors of a layout, in its order of rotary pairs."""
    groups: dict[str, list[Tensor]] = {}
    for ours, theirs in _names(shape, layout).items():
        value = join_pairs(state[ours], shape.num_heads) if ours.endswith(_TURNED) else state[ours]
        groups.setdefault(theirs, []).append(value)
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in groups.items()}


def sizes_of(shapes: Shapes, layout: str, where: str) -> dict[str, Any]:
    """Infer fields of `GptShape` from names and shapes; `num_heads` only for published sizes, and no `grid`."""
    prefix = "model." if layout == LANTERN else ""
    inner = f"{prefix}layers.0.{'mlp.gate_proj' if layout == LANTERN else 'feed_forward.w1'}.weight"
    numbers = [re.fullmatch(rf"{re.escape(prefix)}layers\.(\d+)\..*", name) for name in shapes]
    num_layers = len({number[1] for number in numbers if number})
    vocab_size, dim = _matrix(shapes, _OUTSIDE["embed_tokens.weight"][layout == LANTERN], where)
    ffn_dim, _ = _matrix(shapes, inner, where)
    sizes: dict[str, Any] = {"dim": dim, "vocab_size": vocab_size, "num_layers": num_layers, "ffn_dim": ffn_dim}
    if prefix + _NULL in shapes:
        columns, condition_dim = _matrix(shapes, prefix + _NULL, where)
        sizes |= {"condition": "text", "num_condition_tokens": columns, "condition_dim": condition_dim}
    else:
        rows, _ = _matrix(shapes, prefix + _CLASS, where)
        sizes |= {"condition": "class", "num_condition_tokens": 1, "num_classes": rows - 1}
    num_heads = PUBLISHED_HEADS.get((dim, num_layers))
    return sizes | ({"num_heads": num_heads} if num_heads else {})


def _matrix(shapes: Shapes, name: str, where: str) -> tuple[int, int]:
    size = shapes.get(name)
    if size is None:
        raise CheckpointError(f"{where}: {name} is missing; is the file complete?")
    if len(size) != 2 or min(size) < 1:
        raise CheckpointError(f"{where}: {name} has shape {list(size)}, not that of a matrix")
    return size[0], size[1]
