"""Low-rank differences to linear layers (LoRA, Hu et al. 2021), their merging and their files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import linear

RANK = 16
SCALE = 2.0
"""Factor of the product of both matrices."""
LARGEST_BYTES = 30_000_000
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LowRankLinear(nn.Module):
    """A frozen linear layer plus `SCALE · up · down`; `down` [rank, in] starts random, `up` [out, rank] at zero."""

    def __init__(self, base: nn.Linear, rank: int = RANK) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the layer's outputs [..., out] for inputs [..., in]."""
        base: Tensor = self.base(inputs)
        return base + SCALE * linear(linear(inputs, self.down), self.up)


def attach(model: nn.Module, rank: int = RANK) -> dict[str, nn.Parameter]:
    """Replace the layers named in LAYERS by low-rank ones; return the new parameters by name.

    A parameter is named after the layer's weight: `….q_proj.weight.down` and `….q_proj.weight.up`.
    """
    found: dict[str, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in LAYERS:
            layer = LowRankLinear(module, rank)
            parent, last = name.rsplit(".", 1)
            setattr(model.get_submodule(parent), last, layer)
            found |= {f"{name}.weight.down": layer.down, f"{name}.weight.up": layer.up}
    return found


def merge(weights: Mapping[str, Tensor], differences: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with the differences added, in float32. Raises KeyError if a difference has no weight."""
    merged = dict(weights)
    for name in (name.removesuffix(".down") for name in differences if name.endswith(".down")):
        down, up = (differences[f"{name}.{part}"].float() for part in ("down", "up"))
        merged[name] = weights[name].float() + SCALE * (up @ down)
    return merged


def add(model: nn.Module, differences: dict[str, Tensor]) -> list[str]:
    """Add low-rank differences to weights of a model, and replace its other weights by those given whole; return the
    names of the weights that stay. Raises KeyError or RuntimeError if names or shapes do not fit."""
    whole = {name: one.float() for name, one in differences.items() if not name.endswith((".down", ".up"))}
    low = {name: one for name, one in differences.items() if name.endswith((".down", ".up"))}
    changed = {name.removesuffix(".down") for name in low if name.endswith(".down")}
    weights = model.state_dict()
    merged = merge({name: weights[name] for name in changed}, low)
    missing, unexpected = model.load_state_dict(whole | merged, strict=False)
    if unexpected:
        raise RuntimeError(f"the differences do not fit the model: unexpected {unexpected}")
    return list(missing)


def pack(tensors: dict[str, Tensor], path: Path, notes: dict[str, str]) -> int:
    """Write differences in bfloat16; return the file's size in bytes. Raises ValueError above 30 MB."""
    small = {name: one.to(torch.bfloat16).contiguous() for name, one in tensors.items()}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    packed = save(small, notes)
    if len(packed) > LARGEST_BYTES:
        raise ValueError(f"{path} would have {len(packed):,} bytes, more than {LARGEST_BYTES:,}")
    partial.write_bytes(packed)
    os.replace(partial, path)
    return len(packed)
