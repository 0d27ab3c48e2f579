"""Toy text models: Llama, Qwen2 (biased projections) and Qwen3 (normed heads)."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.toys.weights import VOCAB_SIZE, randomise

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def text_config(vocab_size: int = VOCAB_SIZE) -> LlamaConfig:
    return LlamaConfig(vocab_size=vocab_size, **SIZES)


@cache
def llama(seed: int = 0, vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    model = LlamaForCausalLM(text_config(vocab_size)).eval()
    randomise(model, seed)
    return model


@cache
def qwen2(seed: int = 0) -> Qwen2ForCausalLM:
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB_SIZE, **SIZES)).eval()
    randomise(model, seed)
    return model


@cache
def qwen3(seed: int = 0) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB_SIZE, head_dim=8, **SIZES)).eval()
    randomise(model, seed)
    return model
