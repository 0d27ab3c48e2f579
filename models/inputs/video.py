"""Preprocess clips for LLaVA-OneVision, Qwen2-VL, Qwen2.5-VL and Qwen3-VL without torchvision.

The video processors of transformers need torchvision, which is not compatible with every build of torch. Here sizes,
values and layout are computed in torch, with equal results. The processor class of the family expands the placeholders
in the text, with a `VideoProcessor` as its video processor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import BatchFeature, ProcessorMixin, image_utils
from transformers.image_utils import PILImageResampling
from transformers.utils import PushToHubMixin
from transformers.video_utils import VideoMetadata

from models.inputs.clip import Clip

VIDEO_PART = "video_processor"
MODES = {PILImageResampling.BICUBIC: "bicubic", PILImageResampling.BILINEAR: "bilinear"}
MAX_ASPECT_RATIO = 200

COMMON = {
    "do_resize": True,
    "resample": int(PILImageResampling.BICUBIC),
    "do_center_crop": None,
    "crop_size": None,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": image_utils.OPENAI_CLIP_MEAN,
    "image_std": image_utils.OPENAI_CLIP_STD,
}
PATCHED = {**COMMON, "temporal_patch_size": 2, "merge_size": 2, "cap_pixels_per_frame": None}
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlavaOnevisionVideoProcessor": {**COMMON, "size": {"height": 384, "width": 384}},
    "Qwen2VLVideoProcessor": {
        **PATCHED,
        "patch_size": 14,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "max_video_tokens": 128_000,
    },
    "Qwen3VLVideoProcessor": {
        **PATCHED,
        "image_mean": image_utils.IMAGENET_STANDARD_MEAN,
        "image_std": image_utils.IMAGENET_STANDARD_STD,
        "patch_size": 16,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "max_video_tokens": 768,
    },
}
"""Default settings of each video processor class of transformers (5.17 to 5.23)."""
KIND_OF = {
    "LlavaOnevisionProcessor": "LlavaOnevisionVideoProcessor",
    "Qwen2VLProcessor": "Qwen2VLVideoProcessor",
    "Qwen2_5_VLProcessor": "Qwen2VLVideoProcessor",
    "Qwen3VLProcessor": "Qwen3VLVideoProcessor",
}
"""Video processor class of each supported processor class."""


class VideoSettingsError(ValueError):
    """Raised for unsupported settings of a video processor; the message names them."""


class VideoProcessor(PushToHubMixin):  # type: ignore[misc]
    """Video processor with the results of the transformers class `kind`, which defines the `settings`.

    Raises VideoSettingsError for unknown classes and unsupported settings.
    """

    _auto_class = None

    def __init__(self, kind: str, **settings: Any) -> None:
        if kind not in DEFAULTS:
            raise VideoSettingsError(f"its video processor is {kind}; known are {', '.join(DEFAULTS)}")
        self.kind = kind
        self.given = settings
        merged = {**DEFAULTS[kind], **{name: value for name, value in settings.items() if name in DEFAULTS[kind]}}
        self.size = _size(kind, merged["size"], settings)
        self.do_resize, self.do_normalize = bool(merged["do_resize"]), bool(merged["do_normalize"])
        self.do_rescale, self.rescale_factor = bool(merged["do_rescale"]), float(merged["rescale_factor"])
        self.image_mean = _channels("image_mean", merged["image_mean"])
        self.image_std = _channels("image_std", merged["image_std"])
        if self.do_resize and merged["resample"] not in MODES:
            raise VideoSettingsError(
                f"its video frames are resampled by filter {merged['resample']}, which is not done"
            )
        self.mode = MODES.get(merged["resample"], "")
        if merged["do_center_crop"]:
            raise VideoSettingsError("its video frames are cropped (do_center_crop), which is not done")
        if self.is_patched:
            self.patch_size, self.merge_size = int(merged["patch_size"]), int(merged["merge_size"])
            self.temporal_patch_size = int(merged["temporal_patch_size"])
            self.max_video_tokens = int(merged["max_video_tokens"])
            self.cap_pixels_per_frame = bool(merged["cap_pixels_per_frame"])

    @property
    def is_patched(self) -> bool:
        """Whether outputs are flat patches with a grid (Qwen family) instead of frames."""
        return self.kind != "LlavaOnevisionVideoProcessor"

    @property
    def model_input_names(self) -> list[str]:
        """Names of the outputs, as keyword arguments of the model."""
        return ["pixel_values_videos", "video_grid_thw"] if self.is_patched else ["pixel_values_videos"]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in the format of transformers, whose class can load them."""
        return {**self.given, "video_processor_type": self.kind}

    def __call__(
        self, videos: Sequence[NDArray[np.uint8]], video_metadata: Sequence[VideoMetadata], **_options: Any
    ) -> BatchFeature:
        """Convert frames (T, height, width, 3) and metadata of each video to model inputs.

        Raises ValueError for frame counts or sizes that the model does not support.
        """
        frames = [torch.from_numpy(np.ascontiguousarray(video)).permute(0, 3, 1, 2).contiguous() for video in videos]
        if not self.is_patched:
            pixels = [self._values(self._resize(video)) for video in frames]
            if len({tuple(video.shape) for video in pixels}) > 1:
                raise ValueError("all videos of one prompt must have the same number of frames for this model")
            return BatchFeature({"pixel_values_videos": torch.stack(pixels)})
        patches, grids = zip(*(self._patches(self._values(self._resize(video))) for video in frames))
        data: dict[str, Any] = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        # Qwen3-VL writes times into the prompt as index / fps; our indices are seconds, so fps is 1.
        is_timed = self.kind == "Qwen3VLVideoProcessor"
        data["video_metadata"] = [replace(metadata, fps=1.0) if is_timed else metadata for metadata in video_metadata]
        return BatchFeature(data)

    def _resize(self, frames: Tensor) -> Tensor:
        """Resize frames (T, 3, H, W) uint8 to the target size, with the interpolation of torchvision."""
        height, width = frames.shape[-2:]
        new = self._target_size(frames.shape[0], height, width) if self.do_resize else (height, width)
        if new == (height, width):
            return frames
        return F.interpolate(frames, new, mode=self.mode, align_corners=False, antialias=True)

    def _target_size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        if not self.is_patched:
            if "height" in self.size:
                return self.size["height"], self.size["width"]
            short, long = sorted((height, width))
            new_short, new_long = self.size["shortest_edge"], int(self.size["shortest_edge"] * long / short)
            return (new_short, new_long) if height <= width else (new_long, new_short)
        factor = self.patch_size * self.merge_size
        min_pixels, max_pixels = self.size["shortest_edge"], self.size["longest_edge"]
        if self.kind == "Qwen2VLVideoProcessor":
            if self.cap_pixels_per_frame:
                budget = int(self.max_video_tokens * factor * factor * 0.9) * self.temporal_patch_size // num_frames
                max_pixels = max(min(max_pixels, budget), int(min_pixels * 1.05))
            return frame_size(height, width, factor, min_pixels, max_pixels)
        if self.cap_pixels_per_frame:
            share = min(self.max_video_tokens * factor * factor, max_pixels // num_frames)
            max_pixels = max(share, int(min_pixels * 1.05)) * num_frames
        temporal = self.temporal_patch_size
        if num_frames < temporal:
            raise ValueError(f"a clip needs at least {temporal} frames for this model and has {num_frames}")
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return frame_size(height, width, factor, min_pixels, max_pixels, num_frames, temporal)

    def _values(self, frames: Tensor) -> Tensor:
        """Convert uint8 to float32, rescaled and normalised in one operation as in transformers."""
        values = frames.to(torch.float32)
        if self.do_normalize:
            scale = 1.0 / self.rescale_factor if self.do_rescale else 1.0
            mean, std = ((torch.tensor(stat) * scale)[:, None, None] for stat in (self.image_mean, self.image_std))
            return values.sub_(mean).div_(std)
        return values.mul_(self.rescale_factor) if self.do_rescale else values

    def _patches(self, frames: Tensor) -> tuple[Tensor, list[int]]:
        """Cut frames (T, 3, H, W) into patches (t·h·w, 3·temporal·patch²) in merge order; also return [t, h, w]."""
        temporal, patch, merge = self.temporal_patch_size, self.patch_size, self.merge_size
        if missing := -frames.shape[0] % temporal:
            frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
        num_frames, channels, height, width = frames.shape
        t, h, w = num_frames // temporal, height // patch, width // patch
        cut = frames.view(t, temporal, channels, h // merge, merge, patch, w // merge, merge, patch)
        flat = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, channels * temporal * patch * patch)
        return flat, [t, h, w]


def metadata(clip: Clip) -> VideoMetadata:
    """Convert the times of a clip to transformers' metadata, with frame indices in seconds."""
    return VideoMetadata(total_num_frames=len(clip.frames), fps=clip.fps, frames_indices=list(clip.timestamps_s))


def frame_size(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, num_frames: int = 1, temporal: int = 1
) -> tuple[int, int]:
    """Return the frame size (height, width) of the Qwen family: multiples of `factor`, similar aspect ratio.

    `min_pixels` and `max_pixels` bound the sum over all frames. Raises ValueError for extreme aspect ratios.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ValueError(f"frames of {width} x {height} are longer than {MAX_ASPECT_RATIO} times their shorter side")
    h, w = round(height / factor) * factor, round(width / factor) * factor
    pixels = round(num_frames / temporal) * temporal * h * w
    if pixels > max_pixels:
        beta = math.sqrt(num_frames * height * width / max_pixels)
        h, w = math.floor(height / beta / factor) * factor, math.floor(width / beta / factor) * factor
        return max(factor, h), max(factor, w)
    if pixels < min_pixels:
        beta = math.sqrt(min_pixels / (num_frames * height * width))
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return h, w


def _channels(name: str, value: Any) -> tuple[float, float, float]:
    values = tuple(float(number) for number in (value if isinstance(value, (list, tuple)) else [value] * 3))
    if len(values) != 3:
        raise VideoSettingsError(f"{name} of its video processor has {len(values)} numbers and should have 3")
    return values


def _size(kind: str, size: Any, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the checked size as a dict; `min_pixels` and `max_pixels` of old Qwen settings replace its entries."""
    old_names = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    sizes = {name: int(value) for name, value in dict(size).items() if value is not None and name not in old_names}
    if kind == "Qwen2VLVideoProcessor":
        sizes |= {new: int(settings[old]) for old, new in old_names.items() if settings.get(old) is not None}
    is_onevision = kind == "LlavaOnevisionVideoProcessor"
    names = ({"height", "width"}, {"shortest_edge"}) if is_onevision else ({"shortest_edge", "longest_edge"},)
    if set(sizes) not in names or min(sizes.values()) < 1:
        raise VideoSettingsError(f"the size of its video frames is {size}, which is not understood")
    return sizes


# --- processors that hold one --------------------------------------------------------------------------------------


class _OwnVideoPart(ProcessorMixin):  # type: ignore[misc]
    """Mixin of processors whose video processor is a `VideoProcessor` or None."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == VIDEO_PART and (argument is None or isinstance(argument, VideoProcessor)):
            return None
        return super().check_argument_for_proper_class(argument_name, argument)


@cache
def without_torchvision(processor_class: type[Any]) -> type[Any]:
    """Return a subclass of `processor_class` that accepts a `VideoProcessor` or None, which needs no torchvision; the
    same class for equal arguments, so that processors can be compared."""
    return type(processor_class.__name__, (_OwnVideoPart, processor_class), {})


def video_part(processor_class: type[Any], settings: Mapping[str, Any]) -> VideoProcessor:
    """Create the video processor of a checkpoint from the settings in its files, which may be image settings.

    Raises VideoSettingsError if the processor class or a setting is unsupported.
    """
    kind = settings.get("video_processor_type") or KIND_OF.get(processor_class.__name__)
    if kind is None:
        raise VideoSettingsError(f"videos for a {processor_class.__name__} are not done")
    names = {"video_processor_type", "image_processor_type", "feature_extractor_type", "processor_class", "auto_map"}
    return VideoProcessor(kind, **{name: value for name, value in settings.items() if name not in names})
