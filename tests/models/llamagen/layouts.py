"""Tiny random LlamaGen weights under the published names, and the files that others write them into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.llamagen.shape import GptShape

DIM, HEADS, LAYERS, FFN, VOCAB, GRID = 32, 4, 2, 256, 40, 3
COLUMNS, FEATURES, CLASSES = 6, 10, 5
SIZE_B = GptShape(768, 12, 12, 2048, 16384, 16, "text", 120)
SIZE_XL = GptShape(1280, 36, 20, 3584, 16384, 16, "text", 120)


def official_weights(condition: str, seed: int = 5, **sizes: int) -> dict[str, Tensor]:
    """A state dict as LlamaGen's own training writes it; pairs of a head lie side by side."""
    size = {
        "dim": DIM,
        "layers": LAYERS,
        "ffn": FFN,
        "vocab": VOCAB,
        "columns": COLUMNS,
        "features": FEATURES,
        "classes": CLASSES,
    } | sizes
    dim, ffn = size["dim"], size["ffn"]
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (size["vocab"], dim)}
    if condition == "text":
        shapes["cls_embedding.cap_proj.fc1.weight"] = (dim, size["features"])
        shapes["cls_embedding.cap_proj.fc2.weight"] = (dim, dim)
        shapes["cls_embedding.uncond_embedding"] = (size["columns"], size["features"])
    else:
        shapes["cls_embedding.embedding_table.weight"] = (size["classes"] + 1, dim)
    for index in range(size["layers"]):
        shapes |= {
            f"layers.{index}.attention.wqkv.weight": (3 * dim, dim),
            f"layers.{index}.attention.wo.weight": (dim, dim),
            f"layers.{index}.feed_forward.w1.weight": (ffn, dim),
            f"layers.{index}.feed_forward.w3.weight": (ffn, dim),
            f"layers.{index}.feed_forward.w2.weight": (dim, ffn),
            f"layers.{index}.attention_norm.weight": (dim,),
            f"layers.{index}.ffn_norm.weight": (dim,),
        }
    shapes |= {"norm.weight": (dim,), "output.weight": (size["vocab"], dim)}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def lantern_weights(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same model as LANTERN names it: LlamaForCausalLM, three projections, pairs still side by side."""
    tensors: dict[str, Tensor] = {}
    for name, value in official.items():
        if name.endswith("attention.wqkv.weight"):
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                renamed = name.replace("attention.wqkv", f"self_attn.{part}_proj")
                tensors[f"model.{renamed}"] = rows.clone()
            continue
        for theirs, llama in (
            ("attention.wo.", "self_attn.o_proj."),
            ("feed_forward.w1.", "mlp.gate_proj."),
            ("feed_forward.w3.", "mlp.up_proj."),
            ("feed_forward.w2.", "mlp.down_proj."),
            ("attention_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("tok_embeddings", "embed_tokens"),
        ):
            name = name.replace(theirs, llama)
        tensors["lm_head.weight" if name == "output.weight" else f"model.{name}"] = value
    return tensors


def lantern_config(condition: str) -> dict[str, Any]:
    """The `config.json` of such a folder: a Llama's, with the image's own fields."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": DIM,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-05,
        "rope_base": 10000,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "input_type": "t2i" if condition == "text" else "c2i",
        "cls_token_num": COLUMNS if condition == "text" else 1,
        "block_size": GRID * GRID,
        "caption_dim": FEATURES,
        "num_classes": CLASSES,
        "class_dropout_p": 0.1,
        "token_dropout_p": 0.1,
        "torch_dtype": "float32",
    }
