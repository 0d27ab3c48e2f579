"""Widens and deepens the tensors of a model without changing its function.

With D the old and D' the new width: the residual stream is padded with zeros. RMS norms, whose mean is then over D'
numbers, get weights times √(D/D') and an epsilon times D/D'. Weights that write into the stream (o_proj, down_proj, the
projector's second half) are zero outside the old block, so the padding stays zero and extra heads, neurons and layers
add nothing. Weights that cannot affect an output are random and of ordinary scale. Heads keep their width, on which
rotary positions depend. The vocabulary keeps its size: this part of a real model's cost is not reproduced.

√(D/D') is exact in bfloat16 if D'/D is a power of four; otherwise outputs are only close: 256 → 5120 moves logits by up
to 0.005 of the largest and no token in 396; the image models, 128 → 1280, by 0.03 and 7 codes in 100.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.initialization import no_init_weights

from benchmarks.inflate.shapes import InflationError, Shape, check_growth, head_dim_of, shape_of

FAMILIES = ("llama", "llava")
RANDOM_STD = 0.02
NORM_SPREAD = 0.1


def inflated_config(config: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Return a checkpoint's configuration with the sizes of `shape`.

    Raises:
        InflationError: the family is unknown, or the shape is smaller than the source.
    """
    grown = copy.deepcopy(dict(config))
    text = grown.get("text_config", grown)
    if grown.get("model_type") not in FAMILIES or text.get("model_type") != "llama":
        raise InflationError(
            f"{grown.get('model_type')!r} cannot be inflated: only Llama, and the Llama inside LLaVA, can"
        )
    old = shape_of(text)
    check_growth(old, shape)
    text["head_dim"] = head_dim_of(text)
    text["hidden_size"], text["num_hidden_layers"] = shape.hidden, shape.layers
    text["num_attention_heads"], text["num_key_value_heads"] = shape.heads, shape.kv_heads
    text["intermediate_size"] = shape.ffn
    text["rms_norm_eps"] = text["rms_norm_eps"] * old.hidden / shape.hidden
    # The head's new columns read padding and may be random; the embedding's must be zero.
    text["tie_word_embeddings"] = grown["tie_word_embeddings"] = False
    return grown


ZERO, RANDOM, NORM = "zero", "random", "norm"
# Tensor → its axes (h residual stream, q heads, k key-value heads, f neurons, = unchanged), and the values outside the
# old block.
RULES: dict[str, tuple[str, str]] = {
    "embed_tokens.weight": ("=h", ZERO),
    "lm_head.weight": ("=h", RANDOM),
    "norm.weight": ("h", NORM),
    "input_layernorm.weight": ("h", NORM),
    "post_attention_layernorm.weight": ("h", NORM),
    "q_proj.weight": ("qh", RANDOM),
    "q_proj.bias": ("q", RANDOM),
    "k_proj.weight": ("kh", RANDOM),
    "k_proj.bias": ("k", RANDOM),
    "v_proj.weight": ("kh", RANDOM),
    "v_proj.bias": ("k", RANDOM),
    "o_proj.weight": ("hq", ZERO),
    "o_proj.bias": ("h", ZERO),
    "gate_proj.weight": ("fh", RANDOM),
    "gate_proj.bias": ("f", RANDOM),
    "up_proj.weight": ("fh", RANDOM),
    "up_proj.bias": ("f", RANDOM),
    "down_proj.weight": ("hf", ZERO),
    "down_proj.bias": ("h", ZERO),
    # LLaVA's projector
    "linear_1.weight": ("h=", RANDOM),
    "linear_1.bias": ("h", RANDOM),
    "linear_2.weight": ("hh", ZERO),
    "linear_2.bias": ("h", ZERO),
    # LlamaGen's GPT: head and condition
    "output.weight": ("=h", RANDOM),
    "condition.fc1.weight": ("h=", RANDOM),
    "condition.fc2.weight": ("hh", ZERO),
    "condition.weight": ("=h", ZERO),
}
KEPT = ("vision_tower.", "uncond_embedding")
_LAYER = re.compile(r"(?<![a-z_])layers\.(\d+)\.")


@dataclass(frozen=True)
class Inflation:
    """A source's tensors by name, and how they are enlarged; random values depend on seed and tensor name only."""

    tensors: Mapping[str, Tensor]
    old: Shape
    new: Shape
    head_dim: int
    seed: int

    def fill_all(self, model: nn.Module) -> None:
        """Write all tensors of a model of the new shape."""
        for name, out in model.state_dict().items():
            self.fill(name, out)

    def fill(self, name: str, out: Tensor) -> None:
        """Write an inflated tensor into `out`, in its dtype and on its device."""
        if any(part in name for part in KEPT):
            out.copy_(self.tensors[name])
            return
        axes, outside = self._rule(name)
        scale = (self.old.hidden / self.new.hidden) ** 0.5 if outside == NORM else 1.0
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(out.device).manual_seed(int.from_bytes(digest[:7], "big"))
        if outside == ZERO:
            out.zero_()
        elif outside == NORM:
            out.uniform_(scale * (1 - NORM_SPREAD), scale * (1 + NORM_SPREAD), generator=generator)
        else:
            out.uniform_(-RANDOM_STD * 3**0.5, RANDOM_STD * 3**0.5, generator=generator)
        layer = _LAYER.search(name)
        if layer is None or int(layer[1]) < self.old.layers:
            source = self.tensors[name]
            places = [self._places(axis, size).to(out.device) for axis, size in zip(axes, source.shape, strict=True)]
            block = source.to(out.device)
            # In double precision, so that the factor is rounded once.
            block = (block.double() * scale).to(out.dtype) if outside == NORM else block.to(out.dtype)
            out[places[0] if len(places) == 1 else (places[0][:, None], places[1])] = block

    def _places(self, axis: str, length: int) -> Tensor:
        """Return the indices of the old rows or columns in the new axis."""
        if axis != "q":
            return torch.arange(length)
        # Query heads stay with their key-value head, whose group may have grown.
        group, grown = self.old.heads // self.old.kv_heads, self.new.heads // self.new.kv_heads
        head = torch.arange(self.old.heads)
        placed = head // group * grown + head % group
        return (placed[:, None] * self.head_dim + torch.arange(self.head_dim)).flatten()

    @staticmethod
    def _rule(name: str) -> tuple[str, str]:
        for ending, rule in RULES.items():
            if name == ending or name.endswith(f".{ending}"):
                return rule
        raise InflationError(f"{name}: there is no rule for this tensor")


def auto_class(config: Mapping[str, Any]) -> Any:
    """Return transformers' Auto class for a model of the zoo."""
    return AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM


@torch.no_grad()
def inflate(
    model: PreTrainedModel,
    shape: Shape,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Return a model of another shape that computes the same function, in `dtype` on `device` (the source's by
    default)."""
    plain = model.config.to_dict()
    text = plain.get("text_config", plain)
    config = type(model.config).from_dict(inflated_config(plain, shape))
    inflation = Inflation(model.state_dict(), shape_of(text), shape, head_dim_of(text), seed)
    attention = model.config._attn_implementation
    with torch.device(device or model.device), no_init_weights():
        grown = auto_class(plain).from_config(config, dtype=dtype or model.dtype, attn_implementation=attention)
    inflation.fill_all(grown)
    grown.generation_config = copy.deepcopy(model.generation_config)
    result: PreTrainedModel = grown.requires_grad_(False).eval()
    return result
