"""Builds the vision pair's target from SmolLM2-135M-Instruct and the file of what the target adds to it.

The file has the tower, the projector and the low-rank differences in bfloat16. Differences are added in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import (
    AutoTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from models.loading.checkpoints import CheckpointRef, load_weights, read_config
from zoo.pair import seed_weights
from zoo.real.drafters import VISION_TARGET, add, build, digest
from zoo.real.model import WEIGHTS_SHA256, Refused, is_converted
from zoo.world.dense import GRID

IMAGE_PX, PATCH_PX = 256, 16
SIDE = IMAGE_PX // PATCH_PX
NUM_VISUAL_TOKENS = SIDE * SIDE
CELL = SIDE // GRID
"""Patches per side of a cell of the grid."""
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
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model.generation_config = GenerationConfig(**ids, do_sample=False)
    return model


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Build the target's processor: CLIP's preprocessing on PIL, one image token per patch."""
    size = {"height": IMAGE_PX, "width": IMAGE_PX}
    images = CLIPImageProcessorPil(size=size, crop_size=size, image_mean=[0.5] * 3, image_std=[0.25] * 3)
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH_PX,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )


def apply(model: LlavaForConditionalGeneration, differences: dict[str, Tensor]) -> None:
    """Add the target's differences to a model of `build_model` in place. Raises KeyError or RuntimeError if names or
    shapes do not fit."""
    missing = add(model, differences)
    untouched = [name for name in missing if ".vision_tower." in name or ".multi_modal_projector." in name]
    if untouched:
        raise RuntimeError(f"the differences do not fit the model: missing {untouched}")


def ensure(folder: Path, language: Path = LANGUAGE, path: Path = VISION_TARGET) -> bool:
    """Build the target's model folder unless it is complete already; return whether it was built.

    Raises Refused: without the converted SmolLM2, or if the file was made for other weights.
    """

    def write(output: Path) -> None:
        if not is_converted(language):
            raise Refused(f"{language} is not the converted SmolLM2: run `python -m zoo.real` first")
        with safe_open(path, "pt") as opened:
            sha256 = (opened.metadata() or {}).get("weights_sha256")
        if sha256 != WEIGHTS_SHA256:
            raise Refused(f"{path} has differences to weights with SHA-256 {sha256}, not {WEIGHTS_SHA256}")
        tokenizer = load_tokenizer(language)
        model = build_model(tokenizer, language)
        apply(model, load_file(path))
        model.save_pretrained(output)
        build_processor(tokenizer).save_pretrained(output)

    return build(folder, {"weights_sha256": WEIGHTS_SHA256, "differences_sha256": digest(path)}, write)
