"""Toy models whose layers do not read all earlier tokens, or read later ones: windows, chunks, image blocks, prefixes.

Windows and chunks are short, so that prompts, images and draft trees cross them. Weights that transformers draws at
random and that are no matrices, such as attention sinks, are drawn again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma3TextConfig,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessorPil,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    GemmaConfig,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PhimoeConfig,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

from models.inputs.video import without_torchvision
from models.loading.checkpoints import attention_of
from tests.toys.text import SIZES
from tests.toys.weights import IMAGE_ID, STD, VOCAB_SIZE, make_tokenizer, randomise

WINDOW = 6
NARROW = 2
"""A window that is shorter than a path of a draft tree."""
CHUNK = 8
FIRST_WORD = 9
"""Number of the first word of tokenizers with marks of images, whose ids are before it."""
IMAGE_SIZE_PX = 24
PATCH_PX = 8
NUM_IMAGE_TOKENS = 9
"""More tokens of an image than a window holds."""
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
TEXT: dict[str, Any] = {"vocab_size": VOCAB_SIZE, **SIZES}
GEMMA: dict[str, Any] = {**TEXT, "head_dim": 8, "num_hidden_layers": 4, "layer_types": TYPES, "sliding_window": WINDOW}
GEMMA_4: dict[str, Any] = {
    **GEMMA,
    **{"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    **{"final_logit_softcapping": 3.0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB_SIZE},
    "use_bidirectional_attention": "vision",
}
MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}


def made(config: Any, seed: int) -> Any:
    """Return a random text model with the attention that transformers gives it."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config), dtype=torch.float32)
    return drawn(model.eval(), seed)


def drawn(model: Any, seed: int) -> Any:
    """Draw all weights at random, sinks included."""
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif not parameter.isfinite().all() or (parameter.dim() == 1 and name.endswith("std_scale")):
                parameter.fill_(STD)
    return model


SMALL_4: dict[str, Any] = {
    **GEMMA_4,
    **{"num_hidden_layers": 5, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
"""As Gemma 4 E2B: the last two layers read K and V of layers 1 and 2, and each layer has inputs by token."""

TEXTS: dict[str, Callable[[], Any]] = {
    "mistral": lambda: MistralConfig(**TEXT, sliding_window=WINDOW),
    "mistral_narrow": lambda: MistralConfig(**TEXT, sliding_window=NARROW),
    "phimoe": lambda: PhimoeConfig(**TEXT, **EXPERTS, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3_text": lambda: Gemma3TextConfig(**GEMMA),
    "gemma4_text": lambda: Gemma4TextConfig(**GEMMA_4),
    "gemma4_moe": lambda: Gemma4TextConfig(**GEMMA_4, **MOE),
    "gemma4_e2b": lambda: Gemma4TextConfig(**SMALL_4),
    "cohere2": lambda: Cohere2Config(**TEXT | {"num_hidden_layers": 4}, layer_types=TYPES, sliding_window=WINDOW),
    "llama4_text": lambda: Llama4TextConfig(
        **{**TEXT, **EXPERTS, "num_hidden_layers": 4, "head_dim": 8, "intermediate_size_mlp": 48},
        attention_chunk_size=CHUNK,
        interleave_moe_layer_step=2,
    ),
    "gpt_oss": lambda: GptOssConfig(**{**TEXT, **EXPERTS, "head_dim": 8}, sliding_window=WINDOW),
}


@cache
def text(kind: str, seed: int = 0) -> Any:
    """Return the text model of `TEXTS`."""
    return made(TEXTS[kind](), seed)


def vision(**changes: Any) -> SiglipVisionConfig:
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return SiglipVisionConfig(**sizes, image_size=IMAGE_SIZE_PX, patch_size=PATCH_PX, vision_use_head=False, **changes)


@cache
def gemma3(seed: int = 0) -> Any:
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**GEMMA),
        vision_config=vision(),
        image_token_id=IMAGE_ID,
        boi_token_id=4,
        eoi_token_id=5,
        mm_tokens_per_image=NUM_IMAGE_TOKENS,
        tie_word_embeddings=False,
    )
    return drawn(Gemma3ForConditionalGeneration(config).eval(), seed)


@cache
def gemma4(seed: int = 0, is_small: bool = False) -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma4Config(
        text_config=Gemma4TextConfig(**SMALL_4 if is_small else GEMMA_4),
        vision_config=Gemma4VisionConfig(
            **sizes, num_key_value_heads=2, head_dim=12, patch_size=4, pooling_kernel_size=2, position_embedding_size=64
        ),
        audio_config=None,
        tie_word_embeddings=False,
        image_token_id=IMAGE_ID,
        boi_token_id=4,
        eoi_token_id=5,
    )
    return drawn(Gemma4ForConditionalGeneration(config).eval(), seed)


@cache
def paligemma(seed: int = 0) -> Any:
    config = PaliGemmaConfig(
        vision_config=vision(projection_dim=32),
        text_config=GemmaConfig(**TEXT, head_dim=8),
        image_token_id=IMAGE_ID,
        projection_dim=32,
        tie_word_embeddings=False,
    )
    return drawn(PaliGemmaForConditionalGeneration(config).eval(), seed)


def marked_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the toys with marks around images."""
    marks = {"boi_token": "<boi>", "eoi_token": "<eoi>", "audio_token": "<audio>", "boa_token": "<boa>"}
    marks["eoa_token"] = "<eoa>"
    tokenizer = make_tokenizer(FIRST_WORD, **{mark: 4 + number for number, mark in enumerate(marks.values())})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", *marks.values()]})
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>", **marks},
    )


def gemma3_processor() -> Gemma3Processor:
    images = Gemma3ImageProcessorPil(size={"height": IMAGE_SIZE_PX, "width": IMAGE_SIZE_PX})
    return Gemma3Processor(images, marked_tokenizer(), image_seq_length=NUM_IMAGE_TOKENS)


def gemma4_processor() -> Any:
    from transformers import Gemma4Processor  # transformers 5.17 needs torchvision for it

    images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    return without_torchvision(Gemma4Processor)(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=images,
        tokenizer=marked_tokenizer(),
        video_processor=None,
    )


def paligemma_processor() -> PaliGemmaProcessor:
    images = SiglipImageProcessorPil(size={"height": IMAGE_SIZE_PX, "width": IMAGE_SIZE_PX})
    images.image_seq_length = NUM_IMAGE_TOKENS
    return PaliGemmaProcessor(images, marked_tokenizer())
