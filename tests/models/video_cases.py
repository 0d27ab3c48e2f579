"""Prompts with videos for each family's processor, and what this project's front end makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
)

from models.inputs.clip import Clip
from models.inputs.processing import FrontEnd
from models.inputs.video import KIND_OF, VideoProcessor, without_torchvision

RECORDED = Path(__file__).with_name("official_videos.safetensors")
MAX_VALUES = 2000
"""Of one tensor of pixels; larger ones are recorded at even distances."""
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>", "<video>")
QWEN = "<|vision_start|><|video_pad|><|vision_end|>"


@dataclass(frozen=True)
class Video:
    """Frames of noise of one size, drawn from a longer video: which of its frames, out of how many, at what rate."""

    num_frames: int
    height: int
    width: int
    total_num_frames: int
    fps: float = 30.0

    def frames(self, seed: int) -> NDArray[np.uint8]:
        coarse = np.random.default_rng(seed).integers(0, 256, (self.num_frames, 9, 11, 3), dtype=np.uint8)
        rows = np.arange(self.height) * 9 // self.height
        columns = np.arange(self.width) * 11 // self.width
        fine = np.random.default_rng(seed + 1).integers(0, 20, (self.num_frames, self.height, self.width, 3))
        return np.minimum(coarse[:, rows][:, :, columns].astype(int) + fine, 255).astype(np.uint8)

    @property
    def indices(self) -> list[int]:
        return [int(i) for i in np.linspace(0, self.total_num_frames - 1, self.num_frames).round()]

    def clip(self, seed: int) -> Clip:
        rate = self.num_frames / self.total_num_frames * self.fps
        return Clip(self.frames(seed), tuple(index / self.fps for index in self.indices), rate)

    @property
    def metadata(self) -> dict[str, Any]:
        return {"total_num_frames": self.total_num_frames, "fps": self.fps, "frames_indices": self.indices}


@dataclass(frozen=True)
class Case:
    """One prompt for one processor class; `settings` are its video part's."""

    processor: type[Any]
    prompt: str
    videos: tuple[Video, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    image: bool = False


SMALL = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 600}}
SMALL_ALL = {**SMALL, "size": {"shortest_edge": 64, "longest_edge": 2400}}
CASES = {
    "ov": Case(
        LlavaOnevisionProcessor, "see <video> now", (Video(3, 48, 64, 90),), {"size": {"height": 16, "width": 24}}
    ),
    "ov_default": Case(LlavaOnevisionProcessor, "<video>", (Video(2, 240, 320, 60),)),
    "ov_two": Case(
        LlavaOnevisionProcessor,
        "<video> and <video>",
        (Video(2, 30, 20, 9), Video(2, 60, 40, 9)),
        {"size": {"shortest_edge": 12}},
    ),
    "ov_image": Case(
        LlavaOnevisionProcessor,
        "<image> then <video>",
        (Video(1, 20, 20, 1),),
        {"size": {"height": 16, "width": 16}},
        True,
    ),
    "ov_raw": Case(
        LlavaOnevisionProcessor, "<video>", (Video(2, 16, 16, 60),), {"do_resize": False, "do_normalize": False}
    ),
    "qwen2": Case(Qwen2VLProcessor, f"see {QWEN}", (Video(4, 40, 24, 120),), SMALL),
    "qwen2_5": Case(Qwen2_5_VLProcessor, f"see {QWEN} now", (Video(4, 36, 50, 100, 29.97),), SMALL),
    "qwen2_5_odd": Case(Qwen2_5_VLProcessor, QWEN, (Video(5, 17, 90, 55, 25.0),), SMALL),
    "qwen2_5_one": Case(Qwen2_5_VLProcessor, QWEN, (Video(1, 5, 7, 1),), SMALL),
    "qwen2_5_two": Case(
        Qwen2_5_VLProcessor, f"{QWEN} or {QWEN}", (Video(2, 30, 30, 48, 24.0), Video(6, 20, 44, 31)), SMALL
    ),
    "qwen2_5_image": Case(
        Qwen2_5_VLProcessor,
        f"<|vision_start|><|image_pad|><|vision_end|> {QWEN}",
        (Video(2, 30, 30, 48),),
        SMALL,
        True,
    ),
    "qwen2_5_default": Case(Qwen2_5_VLProcessor, QWEN, (Video(2, 360, 480, 60),)),
    "qwen2_5_capped": Case(
        Qwen2_5_VLProcessor,
        QWEN,
        (Video(8, 60, 90, 60),),
        {**SMALL, "cap_pixels_per_frame": True, "max_video_tokens": 20},
    ),
    "qwen2_5_bilinear": Case(Qwen2_5_VLProcessor, QWEN, (Video(2, 33, 51, 60),), {**SMALL, "resample": 2}),
    "qwen2_5_old": Case(
        Qwen2_5_VLProcessor, QWEN, (Video(2, 70, 51, 60),), {"patch_size": 4, "min_pixels": 64, "max_pixels": 900}
    ),
    "qwen3": Case(Qwen3VLProcessor, f"see {QWEN} now", (Video(4, 36, 50, 100, 29.97),), SMALL_ALL),
    "qwen3_odd": Case(Qwen3VLProcessor, QWEN, (Video(5, 17, 90, 55, 25.0),), SMALL_ALL),
    "qwen3_tiny": Case(Qwen3VLProcessor, QWEN, (Video(2, 4, 5, 7),), SMALL_ALL),
    "qwen3_two": Case(Qwen3VLProcessor, f"{QWEN} or {QWEN}", (Video(2, 30, 30, 48), Video(6, 20, 44, 31)), SMALL_ALL),
    "qwen3_default": Case(Qwen3VLProcessor, QWEN, (Video(4, 240, 320, 60),)),
    "qwen3_capped": Case(
        Qwen3VLProcessor,
        QWEN,
        (Video(8, 60, 90, 60),),
        {**SMALL_ALL, "cap_pixels_per_frame": True, "max_video_tokens": 4},
    ),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and the placeholders: every character of an expanded prompt shows in the ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=base, additional_special_tokens=list(SPECIAL))


def picture() -> NDArray[np.uint8]:
    return Video(1, 30, 22, 1).frames(77)[0]


def build(processor_class: type[Any], case: Case, video_part: Any) -> Any:
    """The case's processor with this video part."""
    options: dict[str, Any] = {"tokenizer": tokenizer(), "video_processor": video_part}
    if case.processor is LlavaOnevisionProcessor:
        images = LlavaOnevisionImageProcessorPil(size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 32]])
        options |= {"num_image_tokens": 9, "vision_feature_select_strategy": "full"}
        return processor_class(image_processor=images, **options)
    return processor_class(
        image_processor=Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=600), **options
    )


def ours(name: str) -> dict[str, Tensor]:
    """What this project's front end makes of a case."""
    case = CASES[name]
    part = VideoProcessor(KIND_OF[case.processor.__name__], **case.settings)
    front_end = FrontEnd(build(without_torchvision(case.processor), case, part))
    images = [picture()] if case.image else []
    return front_end.encode(case.prompt, images, [video.clip(seed) for seed, video in enumerate(case.videos)])


def thinned(tensor: Tensor) -> Tensor:
    """At most `MAX_VALUES` numbers of a tensor of pixels, at even distances; all of any other."""
    if not tensor.is_floating_point() or tensor.numel() <= MAX_VALUES:
        return tensor
    flat = tensor.flatten()
    return flat[torch.linspace(0, flat.numel() - 1, MAX_VALUES, dtype=torch.float64).long()]
