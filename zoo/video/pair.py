"""Builds the tokenizer, the processor and the two untrained models of the video pair, and saves them.

Both are `Qwen2_5_VLForConditionalGeneration`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)

from models.inputs.video import VideoProcessor, without_torchvision
from zoo.pair import language_fields, seed_weights, special_ids, train_tokenizer
from zoo.world import motion
from zoo.world.scene import scene_rng

FRAME_PX, PATCH_PX, MERGE, TEMPORAL = 96, 16, 2, 2
NUM_FRAMES = 8
"""Frames per clip in training; every two frames have 9 visual tokens."""
MAX_POSITIONS = 4096
ROPE_THETA = 10.0
"""Base of the rotary angles. With the usual 10,000, neighbouring cells differ by 0.003 in the slowest angles of a
head of 64, which encode a frame's columns, and the models do not learn positions."""
VISION_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)

# Qwen2.5-VL's turns. A message's content may be a plain string.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif c['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Width, attention and key-value heads (64 wide each), layers, feed-forward width; width, layers of the vision tower.
ARCHITECTURES = {
    "target": {"hidden": 256, "heads": 4, "kv_heads": 2, "layers": 3, "ffn": 512, "vision": 96, "vision_layers": 3},
    "drafter": {"hidden": 64, "heads": 1, "kv_heads": 1, "layers": 2, "ffn": 192, "vision": 64, "vision_layers": 2},
}


def grammar_texts(num_clips: int) -> list[str]:
    """Return texts in which every word of the captions of videos occurs."""
    texts = [f" {word}" for words in motion.FILLERS.values() for word in words]
    for index in range(num_clips):
        rng = scene_rng("train", 0, index)
        drawn = motion.draw_motion(rng, "train")
        texts += [motion.write_motion(drawn, phrasing, rng) for phrasing in motion.PROMPTS]
    return texts


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer of both models."""
    return train_tokenizer(
        ["user\n", "assistant\n", *motion.PROMPTS.values(), *grammar_texts(800)],
        [AddedToken(word, special=True, normalized=False) for word in SPECIALS],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={name.removesuffix("_id"): word for name, word in VISION_TOKENS.items()},
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
    """Build the processor of both models; it resizes frames of any size to 96 px."""
    size = {"shortest_edge": FRAME_PX * FRAME_PX, "longest_edge": FRAME_PX * FRAME_PX}
    sizes: dict[str, Any] = {"patch_size": PATCH_PX, "merge_size": MERGE, "temporal_patch_size": TEMPORAL, "size": size}
    return without_torchvision(Qwen2_5_VLProcessor)(
        image_processor=Qwen2VLImageProcessorPil(**sizes),
        tokenizer=tokenizer,
        video_processor=VideoProcessor("Qwen2VLVideoProcessor", **sizes),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(role: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Build the untrained `target` or `drafter`, its weights drawn from a seed."""
    shape = ARCHITECTURES[role]
    ids = {name: tokenizer.convert_tokens_to_ids(word) for name, word in VISION_TOKENS.items()}
    text = language_fields(shape, tokenizer, MAX_POSITIONS)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": ROPE_THETA, "mrope_section": [8, 12, 12]}
    vision = {
        "depth": shape["vision_layers"],
        "hidden_size": shape["vision"],
        "intermediate_size": 2 * shape["vision"],
        "num_heads": shape["vision"] // 32,
        "patch_size": PATCH_PX,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "out_hidden_size": shape["hidden"],
        "window_size": FRAME_PX,
        "fullatt_block_indexes": list(range(shape["vision_layers"])),
    }
    seed_weights(f"video-{role}", seed)
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    )
    model.generation_config = GenerationConfig(**special_ids(tokenizer), do_sample=False)
    return model


def save_model(model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor, folder: Path) -> None:
    """Save a model in bfloat16 with its processor, in the files of a published checkpoint."""
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    settings = {name: value for name, value in processor.to_dict().items() if not name.endswith("_processor")}
    (folder / "processor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    video = processor.video_processor.to_dict()
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
