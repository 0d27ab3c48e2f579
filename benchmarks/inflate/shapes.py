"""Defines shapes of inflated models: named ones, drafters of a given share, and which shapes a source can take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

HEAD_DIM = 64
"""Width of a head of the zoo's text models."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: width, layers, heads, key-value heads, neurons."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int

    def num_parameters(self, head_dim: int = HEAD_DIM) -> int:
        """Return the number of parameters of the layers, without biases and norms."""
        attention = 2 * self.hidden * head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)


SHAPES = {
    "0.3B": Shape(1024, 22, 16, 16, 2816),
    "7B": Shape(4096, 32, 64, 64, 11008),  # Llama-2-7B, heads of half the width
    "XL": Shape(1280, 36, 40, 40, 3584),  # LlamaGen-XL, for the image models, heads of half the width
}
"""Named shapes; all but XL for a source with heads of 64. XL is not wider by a power of four."""


class InflationError(ValueError):
    """Raised if a model or shape cannot be inflated, or an inflated model differs from its source."""


def drafter_shape(target: Shape, ratio: float) -> Shape:
    """Return a shape with `ratio` of a target's weights, which takes about that share of its time at batch 1.

    Raises InflationError if the ratio is not between 0 and 1.
    """
    if not 0.0 < ratio < 1.0:
        raise InflationError(f"a drafter's ratio must be between 0 and 1, not {ratio}")
    layers = max(2, round(ratio * target.layers))
    per_layer = ratio * target.num_parameters() / layers
    hidden = target.hidden
    # Attention is at most two thirds of a layer, as in common models; widths shrink by four, which is exact.
    while hidden > 4 * HEAD_DIM and 4 * hidden * hidden > 2 * per_layer / 3:
        hidden //= 4
    ffn = round((per_layer - 4 * hidden * hidden) / (3 * hidden) / 64) * 64
    return Shape(hidden, layers, hidden // HEAD_DIM, hidden // HEAD_DIM, max(ffn, 4 * HEAD_DIM))


def named_shape(name: str) -> Shape:
    """Return a shape by its name or `draft-<ratio>` for a drafter of the 0.3B shape; raise InflationError if there is
    none."""
    if name in SHAPES:
        return SHAPES[name]
    if match := re.fullmatch(r"draft-(0?\.\d+)", name):
        return drafter_shape(SHAPES["0.3B"], float(match[1]))
    raise InflationError(f"no shape {name!r}: known are {', '.join(SHAPES)} and draft-<ratio>")


def shape_of(text: Mapping[str, Any]) -> Shape:
    """Return the shape of a text model's configuration."""
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    return Shape(text["hidden_size"], text["num_hidden_layers"], heads, kv_heads, text["intermediate_size"])


def check_growth(old: Shape, new: Shape) -> None:
    """Raise InflationError if a source cannot be inflated to a shape."""
    for field in fields(Shape):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if after < before:
            raise InflationError(f"{field.name} is {before} in the source and would shrink to {after}")
    if new.hidden % new.heads:
        raise InflationError(f"transformers wants a width that {new.heads} heads divide, and {new.hidden} is none")
    if new.heads * old.kv_heads != new.kv_heads * old.heads:
        group = old.heads // old.kv_heads
        raise InflationError(
            f"heads share keys and values by {group} in the source, and not {new.heads}/{new.kv_heads}"
        )
