"""Tiny random LlamaGen weights under the published names, and the files that others write them into."""

from __future__ import annotations

import torch
from torch import Tensor

DIM, HEADS, LAYERS, FFN, VOCAB, GRID = 32, 4, 2, 256, 40, 3
COLUMNS, FEATURES, CLASSES = 6, 10, 5


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
