"""Toy Qwen vision models: 2.5 (3-D rotary positions), 3 dense and mixture-of-experts (deepstack features as well)."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
)

from models.inputs.video import VideoProcessor, without_torchvision
from tests.toys.text import SIZES
from tests.toys.weights import IMAGE_ID, VIDEO_ID, VOCAB_SIZE, make_multimodal_tokenizer, randomise

PATCH_PX = 4
MERGE = 2
SIZES_PX = ((16, 16), (24, 16), (16, 32), (32, 24), (8, 40), (20, 12), (30, 30))
PLACEHOLDER = "w5 <image> w6"
"""Between the start and end marks of every Qwen prompt, without which two neighbouring pictures are taken for one."""
VIDEO_PLACEHOLDER = "w5 <video> w6"
SHOWN = (SIZES_PX, PLACEHOLDER, VIDEO_PLACEHOLDER)
IDS = {"image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID, "vision_start_token_id": 5, "vision_end_token_id": 6}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": PATCH_PX,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": SIZES["hidden_size"],
}
DEEPSTACK: dict[str, Any] = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}


@cache
def qwen2_5_vl(seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    config = Qwen2_5_VLConfig(
        text_config={"vocab_size": VOCAB_SIZE, "rope_parameters": ROPE, **SIZES},
        vision_config={"window_size": 16, "fullatt_block_indexes": [1], **VISION},
        **IDS,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    randomise(model, seed)
    return model


@cache
def qwen3_vl(seed: int = 0) -> Qwen3VLForConditionalGeneration:
    text = {"vocab_size": VOCAB_SIZE, "head_dim": 8, "rope_parameters": ROPE, **SIZES}
    config = Qwen3VLConfig(text_config=text, vision_config=VISION | DEEPSTACK, **IDS)
    model = Qwen3VLForConditionalGeneration(config).eval()
    randomise(model, seed)
    return model


@cache
def qwen3_vl_moe(seed: int = 0) -> Qwen3VLMoeForConditionalGeneration:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    text = {"vocab_size": VOCAB_SIZE, "head_dim": 8, "rope_parameters": ROPE, **SIZES, **experts}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=VISION | DEEPSTACK, **IDS)
    model = Qwen3VLMoeForConditionalGeneration(config).eval()
    randomise(model, seed)
    return model


def _images() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH_PX, merge_size=MERGE, temporal_patch_size=2, min_pixels=8 * 8, max_pixels=48 * 48
    )


def _videos(kind: str, max_pixels: int) -> VideoProcessor:
    size = {"shortest_edge": 8 * 8, "longest_edge": max_pixels}
    return VideoProcessor(kind, patch_size=PATCH_PX, merge_size=MERGE, temporal_patch_size=2, size=size)


def qwen2_5_vl_processor() -> Qwen2_5_VLProcessor:
    made: Qwen2_5_VLProcessor = without_torchvision(Qwen2_5_VLProcessor)(
        image_processor=_images(),
        tokenizer=make_multimodal_tokenizer(),
        video_processor=_videos("Qwen2VLVideoProcessor", 24 * 24),
    )
    return made


def qwen3_vl_processor() -> Qwen3VLProcessor:
    made: Qwen3VLProcessor = without_torchvision(Qwen3VLProcessor)(
        image_processor=_images(),
        tokenizer=make_multimodal_tokenizer(),
        video_processor=_videos("Qwen3VLVideoProcessor", 4 * 24 * 24),
    )
    return made
