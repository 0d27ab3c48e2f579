"""Inflates the zoo's image models (LlamaGen's GPT); vocabulary, grid and condition do not change."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.harness.verdict import first_difference
from benchmarks.inflate.check import Difference, summarise
from benchmarks.inflate.model import Inflation
from benchmarks.inflate.shapes import InflationError, Shape, check_growth
from models.llamagen.gpt import Gpt


@torch.no_grad()
def inflate_gpt(gpt: Gpt, shape: Shape, seed: int = 0) -> Gpt:
    """Return a GPT of another shape that computes the same function; raise InflationError if the source cannot grow to
    the shape, or its heads have another width."""
    ours = gpt.shape
    old = Shape(ours.dim, ours.num_layers, ours.num_heads, ours.num_heads, ours.ffn_dim)
    check_growth(old, shape)
    if shape.kv_heads != shape.heads or shape.hidden != shape.heads * ours.head_dim:
        raise InflationError(
            f"LlamaGen has one key-value head for each head, {ours.head_dim} wide here: {shape.heads} heads and "
            f"{shape.kv_heads} key-value heads do not make {shape.hidden}"
        )
    eps = ours.rms_eps * ours.dim / shape.hidden
    sizes = replace(
        ours, dim=shape.hidden, num_layers=shape.layers, num_heads=shape.heads, ffn_dim=shape.ffn, rms_eps=eps
    )
    with torch.device("meta"):
        empty = Gpt(sizes).to(gpt.output.weight.dtype)
    grown: Gpt = empty.to_empty(device=gpt.output.weight.device)
    Inflation(gpt.state_dict(), old, shape, seed).fill_all(grown)
    return grown.requires_grad_(False).eval()


@torch.no_grad()
def compare_gpts(source: Gpt, grown: Gpt, num_images: int, seed: int) -> Difference:
    """Compare two GPTs along the source's own greedy images, one for each of `num_images` random conditions."""
    generator = torch.Generator().manual_seed(seed)
    pairs, firsts = [], []
    for _ in range(num_images):
        condition: Tensor | int
        if source.shape.condition == "text":
            size = (source.shape.num_condition_tokens, source.shape.condition_dim)
            condition = torch.randn(size, generator=generator)
        else:
            condition = int(torch.randint(source.shape.num_classes, (1,), generator=generator))
        codes = torch.zeros(0, dtype=torch.long)
        for _ in range(source.shape.num_image_tokens):
            best = _logits(source, condition, codes)[-1:].argmax(-1)
            codes = torch.cat([codes, best])
        pairs.append((_logits(source, condition, codes[:-1]), _logits(grown, condition, codes[:-1])))
        firsts.append(first_difference(*(logits.argmax(-1).tolist() for logits in pairs[-1])))
    return summarise(str(source.output.weight.dtype), pairs, firsts)


def _logits(gpt: Gpt, condition: Tensor | int, codes: Tensor) -> Tensor:
    """Return the logits (n + 1, V) of the first code and of the codes after each of n codes."""
    device = gpt.output.weight.device
    before = gpt.embed_class(condition) if isinstance(condition, int) else gpt.embed_text(condition.to(device))
    inputs = torch.cat([before, gpt.embed_tokens(codes.to(device))])[None]
    hidden = gpt(inputs, torch.arange(inputs.shape[1], device=device)[None]).last_hidden_state
    logits: Tensor = gpt.output(hidden[0, len(before) - 1 :])
    return logits.cpu().double()
