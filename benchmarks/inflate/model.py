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

from benchmarks.inflate.shapes import InflationError, Shape, check_growth, shape_of

FAMILIES = ("llama", "llava")
RANDOM_STD = 0.02
NORM_SPREAD = 0.1


def inflated_config(config: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Return a checkpoint's configuration with the sizes of `shape`.

    Raises InflationError if the family is unknown, or the source cannot grow to the shape.
    """
    grown = copy.deepcopy(dict(config))
    text = grown.get("text_config", grown)
    if grown.get("model_type") not in FAMILIES or text.get("model_type") != "llama":
        raise InflationError(
            f"{grown.get('model_type')!r} cannot be inflated: only Llama, and the Llama inside LLaVA, can"
        )
    old = shape_of(text)
    check_growth(old, shape)
    text |= {
        "head_dim": text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "rms_norm_eps": text["rms_norm_eps"] * old.hidden / shape.hidden,
    }
    # The head's new columns read padding and may be random; the embedding's must be zero.
    text["tie_word_embeddings"] = grown["tie_word_embeddings"] = False
    return grown


ZERO, RANDOM, NORM = "zero", "random", "norm"
RULES: dict[str, str] = {
    **dict.fromkeys(("embed_tokens.weight", "o_proj.weight", "down_proj.weight"), ZERO),
    **dict.fromkeys(("lm_head.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight"), RANDOM),
    **dict.fromkeys(("gate_proj.weight", "up_proj.weight"), RANDOM),
    **dict.fromkeys(("norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"), NORM),
    # LLaVA's projector
    **dict.fromkeys(("linear_1.weight", "linear_1.bias"), RANDOM),
    **dict.fromkeys(("linear_2.weight", "linear_2.bias"), ZERO),
    # LlamaGen's GPT: head and condition
    **dict.fromkeys(("output.weight", "condition.fc1.weight"), RANDOM),
    **dict.fromkeys(("condition.fc2.weight", "condition.weight"), ZERO),
}
"""Tensor → the values outside the source's block, which is in the first rows and columns."""
KEPT = ("vision_tower.", "uncond_embedding")
_LAYER = re.compile(r"(?<![a-z_])layers\.(\d+)\.")


@dataclass(frozen=True)
class Inflation:
    """A source's tensors by name, and how they are enlarged; random values depend on seed and tensor name only."""

    tensors: Mapping[str, Tensor]
    old: Shape
    new: Shape
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
        outside = next((rule for ending, rule in RULES.items() if f".{name}".endswith(f".{ending}")), None)
        if outside is None:
            raise InflationError(f"{name}: there is no rule for this tensor")
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
            block = self.tensors[name].to(out.device)
            # In double precision, so that the factor is rounded once.
            block = (block.double() * scale).to(out.dtype) if outside == NORM else block.to(out.dtype)
            out[tuple(map(slice, block.shape))] = block


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
    attention = model.config._attn_implementation
    with torch.device(device or model.device), no_init_weights():
        grown = auto_class(plain).from_config(config, dtype=dtype or model.dtype, attn_implementation=attention)
    Inflation(model.state_dict(), shape_of(text), shape, seed).fill_all(grown)
    grown.generation_config = copy.deepcopy(model.generation_config)
    result: PreTrainedModel = grown.requires_grad_(False).eval()
    return result
