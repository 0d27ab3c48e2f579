"""A model that the engine would run wrongly is refused when it is loaded, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from models.checkpoints import CheckpointError
from models.target import Target
from tests import toys
from tests.toys.text import SIZES

SMALL: dict[str, Any] = {"vocab_size": toys.VOCAB_SIZE, **SIZES}


def make(kind: str) -> torch.nn.Module:
    if kind == "mistral with a window":
        return MistralForCausalLM(MistralConfig(sliding_window=8, **SMALL))
    if kind == "qwen with a window":
        window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        return Qwen3ForCausalLM(Qwen3Config(head_dim=8, **window, **SMALL))
    if kind == "linear attention":
        experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        layers = ["linear_attention", "full_attention"]
        return Qwen3NextForCausalLM(Qwen3NextConfig(layer_types=layers, **experts, **SMALL))
    if kind == "soft-capped scores":
        return Gemma2ForCausalLM(Gemma2Config(head_dim=8, layer_types=["full_attention"] * 2, **SMALL))
    if kind == "state space":
        return MambaForCausalLM(MambaConfig(vocab_size=toys.VOCAB_SIZE, hidden_size=32, num_hidden_layers=2))
    if kind == "state space between attention":
        return JambaForCausalLM(JambaConfig(attn_layer_period=2, attn_layer_offset=1, num_experts=1, **SMALL))
    if kind == "biased attention":
        return BloomForCausalLM(BloomConfig(vocab_size=toys.VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4))
    assert kind == "scaled logits"
    return CohereForCausalLM(CohereConfig(logit_scale=0.25, **SMALL))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mistral with a window", "its attention uses a sliding window"),
        ("qwen with a window", "it has layers of type sliding_attention"),
        ("linear attention", "it has layers of type linear_attention"),
        ("soft-capped scores", "its attention uses soft-capped scores"),
        ("state space", "it has layers of type linear_attention"),
        ("state space between attention", "it has layers of type linear_attention"),
        ("biased attention", "its layers 0, 1 do not attend by transformers' interface"),
        ("scaled logits", "its logits are not its output embedding over its last states"),
    ],
)
def test_a_model_that_is_more_than_full_attention_is_refused(kind: str, reason: str) -> None:
    model = make(kind).eval()
    toys.randomise(model, 0)
    with pytest.raises(CheckpointError) as caught:
        Target(model, toys.front_end("llama"), "somewhere/model")
    message = str(caught.value)
    assert message.startswith("somewhere/model: cannot be run: ")
    assert reason in message
    assert "\n" not in message


def test_a_mistral_without_a_window_is_taken() -> None:
    model = MistralForCausalLM(MistralConfig(sliding_window=None, **SMALL)).eval()
    assert Target(model, toys.front_end("llama")).vocab_size == toys.VOCAB_SIZE


def test_looking_at_a_model_leaves_it_as_it_was() -> None:
    model = MistralForCausalLM(MistralConfig(sliding_window=None, **SMALL)).eval()
    ids = torch.tensor([[1, 9, 30, 4]])
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        Target(model, toys.front_end("llama"))
        assert torch.equal(model(input_ids=ids).logits, before)


def test_a_decoder_that_does_not_take_embeddings_is_refused() -> None:
    model = MistralForCausalLM(MistralConfig(sliding_window=None, **SMALL)).eval()
    model.get_decoder().embed_tokens = torch.nn.Embedding(toys.VOCAB_SIZE, 24)
    with pytest.raises(CheckpointError, match="its decoder does not take embeddings and positions"):
        Target(model, toys.front_end("llama"))
