"""Builds the tokenizer and the models of the vision pair around SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    AutoTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from models.loading.checkpoints import CheckpointRef, load_weights, read_config
from zoo.pair import seed_weights, special_ids
from zoo.real_vision.labels import CELL, IMAGE_PX, NUM_VISUAL_TOKENS, PATCH_PX, SIDE

LANGUAGE = Path("out/real/target")
"""The folder that `python -m zoo.real` writes."""
IMAGE_TOKEN = "<image>"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
VISION = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 6}
WAVE_SIZE = 0.5
"""Amplitude of the first position embeddings: about the deviation of the untrained patch embeddings."""

# SmolLM2's turns, images first in a message. A message's content may be a plain string.
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] if c['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def load_tokenizer(language: Path = LANGUAGE) -> PreTrainedTokenizerFast:
    """Return SmolLM2's tokenizer with the image token as its last token."""
    image = AddedToken(IMAGE_TOKEN, special=True, normalized=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(language, extra_special_tokens={"image_token": image})
    tokenizer.padding_side = "left"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def vision_config() -> CLIPVisionConfig:
    """Return the config of the vision tower."""
    return CLIPVisionConfig(**VISION, image_size=IMAGE_PX, patch_size=PATCH_PX, projection_dim=VISION["hidden_size"])


def build_tower(seed: int) -> CLIPVisionModel:
    """Build the untrained vision tower, its weights drawn from a seed, its position embeddings sinusoids.

    Sinusoids of rows and columns let attention find neighbouring patches from the first step on; from CLIP's small
    random position embeddings the tower needs several times as many steps.
    """
    seed_weights("real-vision-tower", seed)
    tower = CLIPVisionModel(vision_config())
    num_waves = VISION["hidden_size"] // 4
    # From half a cell to twice the image.
    periods = CELL / 2 * (4 * SIDE / CELL) ** (torch.arange(num_waves) / (num_waves - 1))
    angles = 2 * torch.pi * torch.arange(SIDE)[:, None] / periods  # [16, waves]
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = waves[:, None].expand(-1, SIDE, -1), waves[None].expand(SIDE, -1, -1)
    with torch.no_grad():
        tower.embeddings.position_embedding.weight[1:] = WAVE_SIZE * torch.cat([rows, columns], dim=2).flatten(0, 1)
    return tower


def build_model(tokenizer: PreTrainedTokenizerFast, language: Path = LANGUAGE) -> LlavaForConditionalGeneration:
    """Build the LLaVA model of SmolLM2's weights in float32; its tower and projector are untrained.

    The embedding of the image token is zero: it is never read, and as an output its logit is 0.
    """
    text = read_config(CheckpointRef(str(language)))
    num_tokens = text.vocab_size
    text.vocab_size = len(tokenizer)
    config = LlavaConfig(
        vision_config=vision_config(),
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=NUM_VISUAL_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    seed_weights("real-vision-projector", 0)
    model = LlavaForConditionalGeneration(config)
    ref = CheckpointRef(str(language))
    source: Any = load_weights(ref, read_config(ref), "float32", torch.device("cpu"))
    read = source.model.state_dict()
    words = read.pop("embed_tokens.weight")
    model.model.language_model.load_state_dict(read, strict=False)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.zero_()
        table[:num_tokens] = words
    model.tie_weights()
    model.generation_config = GenerationConfig(**special_ids(tokenizer), do_sample=False)
    return model
