"""Low-rank differences to the linear layers of a language model (LoRA: Hu et al., 2021), and their merging."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

RANK = 16
SCALE = 2.0
"""Factor of the product of both matrices."""
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
