"""Creates tiny random LlamaGen models, conditioned on text features or on classes, for tests of the image path.

Weights are drawn in the published layout, which the slow reference reads directly, and reach the engine through the
project's loader.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoding import Request, Sampling
from decoding.contexts import Full, Unconditional
from decoding.contracts import Drafter
from decoding.drafters import EagleDrafter, ModelDrafter
from decoding.drafters.merge import Guided, Merge, SingleLane
from models.heads.eagle import EagleNetwork, EagleShape
from models.heads.eagle3 import Eagle3Network
from models.heads.training.eagle3_loss import fresh_eagle3
from models.llamagen.eagle import pair_rotary
from models.llamagen.gpt import Gpt
from models.llamagen.layouts import OFFICIAL, to_gpt
from models.llamagen.rotary import GridRotary
from models.llamagen.shape import GptShape
from models.llamagen.target import LlamaGenTarget
from tests.llamagen_reference import LlamaGenReference, ReferenceSampling
from tests.toys.devices import captured, device
from tests.toys.weights import STD

CODES = 60
GRID = 4
NUM_COLUMNS = 7
CONDITION_DIM = 12
SHAPES = {
    "text": GptShape(32, 2, 4, 48, CODES, GRID, "text", NUM_COLUMNS, condition_dim=CONDITION_DIM),
    "class": GptShape(32, 2, 2, 48, CODES, GRID, "class", 1, num_classes=5),
    # Four codes, for tests that draw thousands of images.
    "small": GptShape(32, 2, 4, 48, CODES, 2, "text", NUM_COLUMNS, condition_dim=CONDITION_DIM),
}
KINDS = ("text", "class")


@cache
def weights(kind: str, seed: int = 0, noise: float = 0.0) -> dict[str, Tensor]:
    """A state dict in the published layout; `noise` disturbs it, for a drafter that often agrees."""
    shape = SHAPES[kind]
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (CODES, shape.dim)}
    for index in range(shape.num_layers):
        sizes |= {
            f"layers.{index}.attention.wqkv.weight": (3 * shape.dim, shape.dim),
            f"layers.{index}.attention.wo.weight": (shape.dim, shape.dim),
            f"layers.{index}.feed_forward.w1.weight": (shape.ffn_dim, shape.dim),
            f"layers.{index}.feed_forward.w3.weight": (shape.ffn_dim, shape.dim),
            f"layers.{index}.feed_forward.w2.weight": (shape.dim, shape.ffn_dim),
            f"layers.{index}.attention_norm.weight": (shape.dim,),
            f"layers.{index}.ffn_norm.weight": (shape.dim,),
        }
    sizes |= {"norm.weight": (shape.dim,), "output.weight": (CODES, shape.dim)}
    if shape.condition == "text":
        sizes |= {
            "cls_embedding.uncond_embedding": (NUM_COLUMNS, CONDITION_DIM),
            "cls_embedding.cap_proj.fc1.weight": (shape.dim, CONDITION_DIM),
            "cls_embedding.cap_proj.fc2.weight": (shape.dim, shape.dim),
        }
    else:
        sizes["cls_embedding.embedding_table.weight"] = (shape.num_classes + 1, shape.dim)
    drawn = {}
    for name, size in sizes.items():
        wide = torch.randn(size, generator=generator)
        # Small logits, so that distributions are as flat as those of images are.
        drawn[name] = 1.0 + 0.1 * wide if len(size) == 1 else wide * (STD if "output" not in name else 0.6 * STD)
    if noise:
        other = torch.Generator().manual_seed(1000 + seed)
        drawn = {n: w + noise * torch.randn(w.shape, generator=other) * (w.dim() > 1) for n, w in drawn.items()}
    return drawn


def target(kind: str, guided: bool = True, seed: int = 0, noise: float = 0.0) -> LlamaGenTarget:
    """A model for an engine to own."""
    gpt = Gpt(SHAPES[kind])
    gpt.load_state_dict(to_gpt(dict(weights(kind, seed, noise)), SHAPES[kind], OFFICIAL))
    gpt = gpt.eval().requires_grad_(False).to(device())
    return captured(LlamaGenTarget(gpt, None, guided, f"toy-{kind}"))


@cache
def reference(kind: str, seed: int = 0) -> LlamaGenReference:
    return LlamaGenReference(weights(kind, seed), SHAPES[kind].num_heads, SHAPES[kind].grid)


def condition(kind: str, index: int) -> Any:
    """Text features of a length of its own, or a class label; the longest leaves no padding."""
    if kind == "class":
        return index % SHAPES[kind].num_classes
    length = 1 + (3 * index) % NUM_COLUMNS
    return np.random.default_rng(index).standard_normal((length, CONDITION_DIM)).astype(np.float32)


def requests(kind: str, count: int, sampling: Sampling) -> list[Request]:
    """Samples with conditions of different lengths, and guidance of different strength, one of them unguided."""
    scales = [sampling.guidance_scale, 1.0, 2.5, sampling.guidance_scale]
    return [
        Request(
            f"image-{i}",
            "",
            (),
            replace(
                sampling,
                max_new_tokens=SHAPES[kind].grid ** 2,
                guidance_scale=scales[i % 4] if sampling.guidance_scale > 1 else 1.0,
            ),
            seed=5,
            condition=condition(kind, i),
        )
        for i in range(count)
    ]


def reference_sampling(sampling: Sampling) -> ReferenceSampling:
    return ReferenceSampling(
        sampling.guidance_scale, sampling.guidance_interval, sampling.temperature, sampling.top_k, sampling.top_p
    )


def eagle(of: LlamaGenTarget, seed: int = 0) -> Drafter:
    """An EAGLE drafter with random weights over `of`, one lane for each of its lanes."""
    return EagleDrafter(eagle_network(of, seed).to(of.device), of.head, of.num_lanes, merge_of(of))


def eagle3(of: LlamaGenTarget) -> Drafter:
    """An EAGLE-3 drafter with random weights over `of`, which drafts half of the codes."""
    network = eagle3_network(of)
    return EagleDrafter(network, network.output_layer(of.vocab_size), of.num_lanes, merge_of(of))


def eagle3_network(of: LlamaGenTarget) -> Eagle3Network:
    rotary = pair_rotary(of.gpt.shape, of.gpt.shape.head_dim)
    return fresh_eagle3(of, 0, token_ids=range(0, CODES, 2), feature_layers=(0, 1), rotary=rotary).network


def eagle_network(of: LlamaGenTarget, seed: int = 0) -> EagleNetwork:
    shape = of.gpt.shape
    torch.manual_seed(seed)
    rotary = GridRotary(shape.head_dim, shape.grid, shape.num_condition_tokens - 1, shape.rope_base)
    sizes = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_attention_heads": shape.num_heads,
    }
    network = EagleNetwork(EagleShape.of(sizes, "a toy"), rotary)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, STD)
    return network.eval()


def smaller(of: LlamaGenTarget, kind: str, noise: float = 0.02) -> Drafter:
    """An independent model as drafter: the target's weights, disturbed."""
    model = target(kind, of.num_lanes == 2, noise=noise)
    contexts = [Full(), Unconditional()][: of.num_lanes]
    return ModelDrafter(model, contexts, of.vocab_size, merge_of(of))


def merge_of(of: LlamaGenTarget) -> Merge:
    return SingleLane() if of.num_lanes == 1 else Guided()
