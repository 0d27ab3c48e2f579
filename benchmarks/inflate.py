"""Pairs that cost what large ones cost: a small trained model, widened and deepened without changing its function.

    python -m benchmarks.inflate zoo/checkpoints/text_target out/text_0.3B --shape 0.3B
    python -m benchmarks.inflate zoo/checkpoints/text_drafter out/text_draft --shape draft-0.05 --dtype bfloat16
    python -m benchmarks.inflate SOURCE DESTINATION --shape hidden=1024,layers=6,heads=16,kv_heads=16,ffn=2816

Acceptance is then that of the trained pair and time that of a model of the new size. How the function stays (D old,
D' new width): the residual stream is padded with zeros; RMS norms, whose mean is then over D' numbers, get weights
times √(D/D') and an epsilon times D/D'; what writes into the stream (o_proj, down_proj, the projector's second half)
is zero outside the old block, so the pads stay zero and extra heads, neurons and layers write nothing. Everything that
cannot reach an output, so all columns that read pads and all extra heads, neurons and layers up to their output
projections, is random and of ordinary scale. Heads keep their width, which rotary positions depend on. A vocabulary
stays as small as it was: the largest part of a real model's cost that is not reproduced.

√(D/D') is exact in bfloat16 when D'/D is a power of four; otherwise norm weights are rounded anew and outputs are only
close: 256 → 5120 moves logits by up to 0.005 of the largest and no token in 396; the image models, whose choices are
less sure, 128 → 1280 by 0.03 and 7 codes in 100. `benchmarks.inflate_check` measures it, before anything is written.

Owns tensors; shapes are `benchmarks.inflate_shapes`, folders `benchmarks.inflate_files`.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.initialization import no_init_weights

from benchmarks.inflate_shapes import (
    SHAPES,
    InflationError,
    Shape,
    check_growth,
    head_dim_of,
    named_shape,
    shape_of,
)

FAMILIES = ("llama", "llava")
RANDOM_STD = 0.02
NORM_SPREAD = 0.1


def inflated_config(config: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """A checkpoint's configuration, as plain data, with the sizes of `shape`.

    Raises:
        InflationError: the family is not known here, or the shape is smaller than the source.
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
    # The head reads pads, which are zero, so its new columns may be random; those of the embedding may not.
    text["tie_word_embeddings"] = grown["tie_word_embeddings"] = False
    return grown


# --- tensors -------------------------------------------------------------------------------------------------------

ZERO, RANDOM, NORM = "zero", "random", "norm"
# Tensor → what its axes count (h residual stream, q heads, k key-value heads, f neurons, = stays), and what stands
# outside the old block.
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
    # LLaVA's projector: as wide inside as the residual stream.
    "linear_1.weight": ("h=", RANDOM),
    "linear_1.bias": ("h", RANDOM),
    "linear_2.weight": ("hh", ZERO),
    "linear_2.bias": ("h", ZERO),
    # LlamaGen's GPT: its head, and what carries a text's features or a class into the stream.
    "output.weight": ("=h", RANDOM),
    "condition.fc1.weight": ("h=", RANDOM),
    "condition.fc2.weight": ("hh", ZERO),
    "condition.weight": ("=h", ZERO),
}
KEPT = ("vision_tower.", "uncond_embedding")
_LAYER = re.compile(r"(?<![a-z_])layers\.(\d+)\.")


@dataclass(frozen=True)
class Inflation:
    """A source's tensors, by name, and how they grow; every tensor is made alone, its random part from its own name."""

    tensors: Mapping[str, Tensor]
    old: Shape
    new: Shape
    head_dim: int
    seed: int

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and sizes of all tensors of the inflated model; a tied head gets one of its own."""
        first = [name for name in self.tensors if self._layer(name) == 0]
        for name in self.tensors:
            if self._layer(name) is None:
                yield name, self.size(name)
        if not any(name.endswith("lm_head.weight") for name in self.tensors):
            yield self._tied_name(), self.size(self._tied_name())
        for layer in range(self.new.layers):
            for name in first:
                found = _LAYER.search(name)
                assert found is not None, name
                yield name[: found.start(1)] + str(layer) + name[found.end(1) :], self.size(name)

    def size(self, name: str) -> tuple[int, ...]:
        """The size of an inflated tensor."""
        source = self._like(name)
        if self._is_kept(name):
            return tuple(source.shape)
        axes, _ = self._rule(name)
        grown = {"h": self.new.hidden, "f": self.new.ffn}
        grown |= {"q": self.new.heads * self.head_dim, "k": self.new.kv_heads * self.head_dim}
        return tuple(grown.get(axis, length) for axis, length in zip(axes, source.shape, strict=True))

    def fill(self, name: str, out: Tensor) -> None:
        """Write an inflated tensor into `out`, whose device and type it takes."""
        if self._is_kept(name):
            out.copy_(self.tensors[name])
            return
        axes, outside = self._rule(name)
        scale = (self.old.hidden / self.new.hidden) ** 0.5 if outside == NORM else 1.0
        if outside == ZERO:
            out.zero_()
        else:
            digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
            generator = torch.Generator(out.device).manual_seed(int.from_bytes(digest[:7], "big"))
            if outside == NORM:
                out.uniform_(scale * (1 - NORM_SPREAD), scale * (1 + NORM_SPREAD), generator=generator)
            else:
                out.uniform_(-RANDOM_STD * 3**0.5, RANDOM_STD * 3**0.5, generator=generator)
        layer = self._layer(name)
        if layer is None or layer < self.old.layers:
            source = self._source(name)
            places = [
                self._places(axis, length).to(out.device) for axis, length in zip(axes, source.shape, strict=True)
            ]
            block = source.to(out.device)
            # In double precision, so that the factor is rounded once.
            block = (block.double() * scale).to(out.dtype) if outside == NORM else block.to(out.dtype)
            out[places[0] if len(places) == 1 else (places[0][:, None], places[1])] = block

    def _places(self, axis: str, length: int) -> Tensor:
        """Where the old rows or columns of an axis stand in the new one."""
        if axis != "q":
            return torch.arange(length)
        # Query heads stay with their key-value head, whose group may have grown.
        group, grown = self.old.heads // self.old.kv_heads, self.new.heads // self.new.kv_heads
        head = torch.arange(self.old.heads)
        placed = head // group * grown + head % group
        return (placed[:, None] * self.head_dim + torch.arange(self.head_dim)).flatten()

    def _source(self, name: str) -> Tensor:
        if name in self.tensors:
            return self.tensors[name]
        return next(value for key, value in self.tensors.items() if key.endswith("embed_tokens.weight"))

    def _like(self, name: str) -> Tensor:
        """The source tensor of the same kind: that of the first layer where the source has no such layer."""
        return self._source(_LAYER.sub("layers.0.", name))

    def _tied_name(self) -> str:
        embedding = next(name for name in self.tensors if name.endswith("embed_tokens.weight"))
        return "language_model.lm_head.weight" if embedding.startswith("language_model.model.") else "lm_head.weight"

    @staticmethod
    def _is_kept(name: str) -> bool:
        return any(part in name for part in KEPT)

    def _layer(self, name: str) -> int | None:
        found = None if self._is_kept(name) else _LAYER.search(name)
        return int(found[1]) if found else None

    @staticmethod
    def _rule(name: str) -> tuple[str, str]:
        for ending, rule in RULES.items():
            if name == ending or name.endswith(f".{ending}"):
                return rule
        raise InflationError(f"{name}: nothing is known of such a tensor")


@torch.no_grad()
def inflate(
    model: PreTrainedModel,
    shape: Shape,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """A model of another shape and the same function, made on `device` in `dtype` (the source's unless given).

    Raises:
        InflationError: the family is not known here, or the shape is smaller than the source.
    """
    plain = model.config.to_dict()
    text = plain.get("text_config", plain)
    config = type(model.config).from_dict(inflated_config(plain, shape))
    inflation = Inflation(model.state_dict(), shape_of(text), shape, head_dim_of(text), seed)
    loader: Any = AutoModelForImageTextToText if "text_config" in plain else AutoModelForCausalLM
    attention = model.config._attn_implementation
    with torch.device(device or model.device), no_init_weights():
        grown = loader.from_config(config, dtype=dtype or model.dtype, attn_implementation=attention)
    for name, out in grown.state_dict().items():
        inflation.fill(name, out)
    grown.generation_config = copy.deepcopy(model.generation_config)
    return grown.requires_grad_(False).eval()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from benchmarks.inflate_files import inflate_folder
    from benchmarks.inflate_images import inflate_image_folder, is_image_model

    parser = argparse.ArgumentParser(prog="python -m benchmarks.inflate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", help="a checkpoint folder of the zoo")
    parser.add_argument("destination", help="the folder to write")
    parser.add_argument("--shape", required=True, help=f"{', '.join(SHAPES)}, draft-<ratio>, or all sizes")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        shape = named_shape(options.shape)
        write = inflate_image_folder if is_image_model(options.source) else inflate_folder
        told = write(options.source, options.destination, shape, options.dtype, options.seed)
    except InflationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"shape": asdict(shape), **told}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
