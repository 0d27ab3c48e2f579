"""Toy text models: Llama, Qwen2 (biased projections) and Qwen3 (normed heads)."""

from __future__ import annotations

from functools import cache

from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from decoding.conformance.toys import SIZES, VOCAB_SIZE, llama, randomise, text_config

__all__ = ["SIZES", "llama", "qwen2", "qwen3", "text_config"]


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
