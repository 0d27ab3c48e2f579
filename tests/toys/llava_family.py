"""Toy LLaVA models: 1.5 (one square), NeXT (tiles in the picture's own shape) and OneVision (SigLIP, larger grids)."""

from __future__ import annotations

from functools import cache

from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    LlavaProcessor,
    Qwen2Config,
    SiglipVisionConfig,
)

from models.inputs.video import VideoProcessor, without_torchvision
from tests.toys.text import SIZES, text_config
from tests.toys.weights import IMAGE_ID, VIDEO_ID, VOCAB_SIZE, make_multimodal_tokenizer, make_tokenizer, randomise

IMAGE_SIZE_PX = 16
PATCH_PX = 8
TILED_SIZES_PX = ((16, 16), (30, 14), (14, 30), (31, 33), (12, 40), (40, 22), (9, 9))
GRID_PX = [[16, 32], [32, 16], [32, 32]]
VISION = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@cache
def llava(seed: int = 0) -> LlavaForConditionalGeneration:
    vision = CLIPVisionConfig(image_size=IMAGE_SIZE_PX, patch_size=PATCH_PX, **VISION)
    config = LlavaConfig(
        vision_config=vision, text_config=text_config(), image_token_index=IMAGE_ID, vision_feature_layer=-2
    )
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


@cache
def llava_next(seed: int = 0) -> LlavaNextForConditionalGeneration:
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(image_size=IMAGE_SIZE_PX, patch_size=PATCH_PX, **VISION),
        text_config=text_config(),
        image_token_index=IMAGE_ID,
        image_grid_pinpoints=GRID_PX,
        vision_feature_layer=-2,
    )
    model = LlavaNextForConditionalGeneration(config).eval()
    randomise(model, seed)
    return model


def llava_next_processor() -> LlavaNextProcessor:
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE_PX},
        crop_size={"height": IMAGE_SIZE_PX, "width": IMAGE_SIZE_PX},
        image_grid_pinpoints=GRID_PX,
    )
    return LlavaNextProcessor(
        image_processor=images,
        tokenizer=make_tokenizer(),
        patch_size=PATCH_PX,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )


@cache
def llava_onevision(seed: int = 0) -> LlavaOnevisionForConditionalGeneration:
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(
            image_size=IMAGE_SIZE_PX, patch_size=PATCH_PX, vision_use_head=False, **VISION
        ),
        text_config=Qwen2Config(vocab_size=VOCAB_SIZE, **SIZES),
        image_token_index=IMAGE_ID,
        video_token_index=VIDEO_ID,
        image_grid_pinpoints=GRID_PX,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    model = LlavaOnevisionForConditionalGeneration(config).eval()
    randomise(model, seed)
    return model


def llava_onevision_processor() -> LlavaOnevisionProcessor:
    images = LlavaOnevisionImageProcessorPil(
        size={"height": IMAGE_SIZE_PX, "width": IMAGE_SIZE_PX}, image_grid_pinpoints=GRID_PX
    )
    processor: LlavaOnevisionProcessor = without_torchvision(LlavaOnevisionProcessor)(
        image_processor=images,
        tokenizer=make_multimodal_tokenizer(),
        video_processor=VideoProcessor(
            "LlavaOnevisionVideoProcessor", size={"height": IMAGE_SIZE_PX, "width": IMAGE_SIZE_PX}
        ),
        num_image_tokens=(IMAGE_SIZE_PX // PATCH_PX) ** 2,
        vision_feature_select_strategy="full",
    )
    return processor
