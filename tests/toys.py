"""Tiny random models with their real transformers classes, made in memory: what the engine is proved on.

Weights are drawn with a standard deviation of 0.2, because the default 0.02 makes a model that ignores its positions.
"""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from models.front_end import FrontEnd
from models.target import Target

VOCAB_SIZE = 64
STD = 0.2
IMAGE_SIZE_PX = 16
PATCH_PX = 8


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words w4 … w63 with bos 1, eos 2, image 3; token id = the number in the word."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<image>": 3} | {f"w{i}": i for i in range(4, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )


def randomise(model: torch.nn.Module, seed: int, std: float = STD) -> None:
    """Redraw every matrix; norms keep their ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def text_config(vocab_size: int = VOCAB_SIZE) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


@cache
def llama(seed: int = 0, vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    model = LlamaForCausalLM(text_config(vocab_size)).eval()
    randomise(model, seed)
    return model


@cache
def llava(seed: int = 0) -> LlavaForConditionalGeneration:
    vision = CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE_PX,
        patch_size=PATCH_PX,
    )
    config = LlavaConfig(vision_config=vision, text_config=text_config(), image_token_index=3, vision_feature_layer=-2)
    model = LlavaForConditionalGeneration(config).eval()
    randomise(model, seed)
    return model


def llava_processor() -> LlavaProcessor:
    images = CLIPImageProcessor(
        size={"shortest_edge": IMAGE_SIZE_PX}, crop_size={"height": IMAGE_SIZE_PX, "width": IMAGE_SIZE_PX}
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=make_tokenizer(),
        patch_size=PATCH_PX,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )


def front_end(family: str) -> FrontEnd:
    return FrontEnd(llava_processor() if family == "llava" else make_tokenizer())


def oracle(family: str, seed: int = 0) -> torch.nn.Module:
    """The model as transformers runs it; never handed to an engine."""
    return {"llama": llama, "llava": llava}[family](seed)


def target(family: str, seed: int = 0) -> Target:
    """A copy of the oracle, owned by an engine."""
    return Target(copy.deepcopy(oracle(family, seed)), front_end(family), family)


def perturbed(family: str, noise: float, seed: int = 0) -> Target:
    """The target with its matrices disturbed: agrees with it often, but not always."""
    model = copy.deepcopy(oracle(family, seed))
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return Target(model, front_end(family), f"{family}-perturbed")


def picture(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (IMAGE_SIZE_PX, IMAGE_SIZE_PX + seed % 5, 3), dtype=np.uint8)


def prompt(family: str, seed: int) -> tuple[str, tuple[NDArray[np.uint8], ...]]:
    """A prompt of its own length, with zero to two images for the families that take them."""
    generator = np.random.default_rng(seed)
    words = [f"w{i}" for i in generator.integers(4, VOCAB_SIZE, int(generator.integers(2, 12)))]
    num_images = int(generator.integers(0, 3)) if family == "llava" else 0
    for _ in range(num_images):
        words.insert(int(generator.integers(0, len(words))), "<image>")
    return " ".join(["<s>", *words]), tuple(picture(100 * seed + i) for i in range(num_images))
