"""EAGLE-3 heads for Qwen3-VL, whose rotary axes are interleaved: read from files, and equal to a plain forward."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding, apply_rotary_pos_emb

from models.heads.eagle3 import Eagle3Network, Eagle3Shape, pair_axes
from models.heads.formats import EAGLE3
from models.heads.loader import load_head
from models.heads.writer import save_eagle3
from models.loading.checkpoints import CheckpointRef

SECTIONS = (4, 2, 2)
HIDDEN, HEADS, HEAD_DIM, VOCAB, LENGTH = 32, 2, 16, 40, 12
CPU = torch.device("cpu")


def made(interleaved: bool) -> Eagle3Network:
    layers = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        num_hidden_layers=1,
    )
    shape = Eagle3Shape(layers, VOCAB, HIDDEN, (0, 1), mrope_sections=SECTIONS, mrope_interleaved=interleaved)
    torch.manual_seed(0)
    network = Eagle3Network(shape)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape) * (0.3 if parameter.dim() > 1 else 1.0)
    return network.requires_grad_(False).eval()


def positions() -> Tensor:
    """Axes of a prompt with an image of 2 × 3 features between texts, (3, L)."""
    time = [0, 1, 2, *[3] * 6, 6, 7, 8]
    height = [0, 1, 2, *(3 + i // 3 for i in range(6)), 6, 7, 8]
    width = [0, 1, 2, *(3 + i % 3 for i in range(6)), 6, 7, 8]
    return torch.tensor([time, height, width])


def norm(weight: Tensor, states: Tensor) -> Tensor:
    return weight * states * (states.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


def plain_logits(weights: dict[str, Tensor], tokens: Tensor, features: Tensor) -> Tensor:
    """The published network as a few lines, with the rotary embedding of Qwen3-VL."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(SECTIONS), "mrope_interleaved": True}
    config = Qwen3VLTextConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, head_dim=HEAD_DIM, rope_parameters=rope, vocab_size=VOCAB
    )
    states = features @ weights["fc.weight"].T
    embeds = weights["embed_tokens.weight"][tokens]
    normed = norm(weights["layers.0.hidden_norm.weight"], states)
    inputs = torch.cat([norm(weights["layers.0.input_layernorm.weight"], embeds), normed], dim=-1)
    query, key, value = (
        (inputs @ weights[f"layers.0.self_attn.{name}_proj.weight"].T).view(LENGTH, HEADS, HEAD_DIM).transpose(0, 1)
        for name in "qkv"
    )
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(inputs, positions()[:, None])
    query, key = apply_rotary_pos_emb(query[None], key[None], cos, sin)
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    mixed = ((query @ key.transpose(2, 3) / HEAD_DIM**0.5 + mask).softmax(-1) @ value)[0]
    states = states + mixed.transpose(0, 1).flatten(1) @ weights["layers.0.self_attn.o_proj.weight"].T
    inner = norm(weights["layers.0.post_attention_layernorm.weight"], states)
    gate, up = (inner @ weights[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    states = states + (F.silu(gate) * up) @ weights["layers.0.mlp.down_proj.weight"].T
    return norm(weights["norm.weight"], states) @ weights["lm_head.weight"].T


def logits_of(network: Eagle3Network, tokens: Tensor, features: Tensor) -> Tensor:
    pairs = network.fuse(network.embed_tokens(tokens), network.project(features))
    outputs = network(pairs[None], positions()[:, None]).last_hidden_state
    return network.output_layer(VOCAB)(outputs)[0]


@torch.no_grad()
def test_a_head_of_a_file_equals_a_plain_forward(tmp_path: Path) -> None:
    network = made(interleaved=True)
    save_eagle3(network, tmp_path, "some/target", ("Qwen3VLForConditionalGeneration",), 3)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["transformer_layer_config"]["rope_parameters"]["mrope_interleaved"] is True
    loaded = load_head(EAGLE3, CheckpointRef(str(tmp_path)), "float32", CPU, 4)
    assert loaded.shape.mrope_interleaved
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
    features = torch.randn(LENGTH, 2 * HIDDEN, generator=generator)
    expected = plain_logits(network.state_dict(), tokens, features)
    torch.testing.assert_close(logits_of(loaded, tokens, features), expected, rtol=1e-4, atol=1e-4)
    # Axes one after the other would be another head.
    other: Any = Eagle3Network(replace(network.shape, mrope_interleaved=False))
    other.load_state_dict(network.state_dict())
    assert float((logits_of(other, tokens, features) - expected).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("sections", "interleaved", "axes"),
    [
        ((2, 1, 1), False, [0, 0, 1, 2]),
        ((2, 1, 1), True, [0, 1, 2, 0]),
        ((4, 2, 2), True, [0, 1, 2, 0, 1, 2, 0, 0]),
    ],
)
def test_pairs_have_the_axes_of_their_layout(sections: tuple[int, ...], interleaved: bool, axes: list[int]) -> None:
    assert pair_axes(sections, interleaved) == axes
