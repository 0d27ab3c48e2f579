"""Tiny random models with their real transformers classes, made in memory: what the engine is proved on.

One line per family in `FAMILIES`; everything else works by family name. Weights are drawn with a standard deviation of
0.2, because the default 0.02 makes a model that ignores its positions.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from decoding.conformance.toys import disturb
from models.inputs.clip import Clip
from models.inputs.processing import FrontEnd
from models.target import Target
from tests.toys import llava_family, masked, qwen_vl, recurrent, text
from tests.toys.devices import captured, device, on
from tests.toys.llava_family import IMAGE_SIZE_PX, PATCH_PX, llava, llava_processor
from tests.toys.text import llama, text_config
from tests.toys.weights import STD, VOCAB_SIZE, make_qwen_tokenizer, make_tokenizer, randomise

__all__ = [
    "FAMILIES",
    "IMAGE_SIZE_PX",
    "MASKED",
    "PATCH_PX",
    "RECURRENT",
    "STD",
    "VOCAB_SIZE",
    "clip",
    "family_of",
    "front_end",
    "llama",
    "llava",
    "llava_processor",
    "make_tokenizer",
    "on",
    "oracle",
    "perturbed",
    "picture",
    "processor",
    "prompt",
    "randomise",
    "save",
    "takes_images",
    "target",
    "text_config",
    "with_video",
]


@dataclass(frozen=True)
class Family:
    """How one family's `model(seed)` and processor are made, the sizes (height, width) of its pictures, and the
    placeholders of a picture and a video in its prompts."""

    model: Callable[..., torch.nn.Module]
    processor: Callable[[], Any]
    sizes_px: tuple[tuple[int, int], ...] = ()
    placeholder: str = "<image>"
    video_placeholder: str = ""

    @property
    def takes_images(self) -> bool:
        return bool(self.sizes_px)


FAMILIES = {
    "llama": Family(llama, make_tokenizer),
    "qwen2": Family(text.qwen2, make_qwen_tokenizer),
    "qwen3": Family(text.qwen3, make_tokenizer),
    "llava": Family(llava, llava_processor, tuple((IMAGE_SIZE_PX, IMAGE_SIZE_PX + extra) for extra in range(5))),
    "llava_next": Family(llava_family.llava_next, llava_family.llava_next_processor, llava_family.TILED_SIZES_PX),
    "llava_onevision": Family(
        llava_family.llava_onevision,
        llava_family.llava_onevision_processor,
        llava_family.TILED_SIZES_PX,
        video_placeholder="<video>",
    ),
    "qwen2_5_vl": Family(qwen_vl.qwen2_5_vl, qwen_vl.qwen2_5_vl_processor, *qwen_vl.SHOWN),
    "qwen3_vl": Family(qwen_vl.qwen3_vl, qwen_vl.qwen3_vl_processor, *qwen_vl.SHOWN),
    "qwen3_vl_moe": Family(qwen_vl.qwen3_vl_moe, qwen_vl.qwen3_vl_processor, *qwen_vl.SHOWN),
}

RECURRENT = {name: Family(model, make, *shown) for name, (model, make, shown) in recurrent.MODELS.items()}
"""Families with recurrent layers, which verify chains only."""

MASKED = {
    **{kind: Family(partial(masked.text, kind), make_tokenizer) for kind in masked.TEXTS},
    "gemma3": Family(masked.gemma3, masked.gemma3_processor, ((24, 30), (40, 20)), "<boi>"),
    "gemma4": Family(masked.gemma4, masked.gemma4_processor, ((24, 24), (16, 40), (60, 20))),
    "gemma4_small": Family(
        partial(masked.gemma4, is_small=True), masked.gemma4_processor, ((24, 24), (16, 40), (60, 20))
    ),
    "paligemma": Family(masked.paligemma, masked.paligemma_processor, ((24, 30), (40, 20))),
}
"""Families with windows, chunks, image blocks or prefixes, whose prompts `tests.conformance.masked` makes."""


def family_of(name: str) -> Family:
    """The family of a name in `FAMILIES`, `RECURRENT` or `MASKED`; tests may add families."""
    return (FAMILIES | RECURRENT | MASKED)[name]


def takes_images(family: str) -> bool:
    return family_of(family).takes_images


@cache
def processor(family: str) -> Any:
    """The family's own processor over the toys' tokenizer, or that tokenizer alone."""
    return family_of(family).processor()


def front_end(family: str) -> FrontEnd:
    return FrontEnd(processor(family))


def oracle(family: str, seed: int = 0) -> torch.nn.Module:
    """The model as transformers runs it; never handed to an engine."""
    model = family_of(family).model(seed)
    inner = getattr(model, "model", None)
    if getattr(inner, "rope_deltas", None) is not None:
        # Left over from the last prompt with images, and applied to the next prompt that has none.
        inner.rope_deltas = None
    return model


def owned(model: torch.nn.Module, family: str, name: str) -> Target:
    """The model for an engine to own."""
    return captured(Target(model.to(device()), front_end(family), name))


def target(family: str, seed: int = 0) -> Target:
    """A copy of the oracle, owned by an engine."""
    return owned(copy.deepcopy(oracle(family, seed)), family, family)


def perturbed(family: str, noise: float, seed: int = 0) -> Target:
    """The target with its matrices disturbed: agrees with it often, but not always."""
    model = copy.deepcopy(oracle(family, seed))
    disturb(model, noise, 1000 + seed)
    return owned(model, family, f"{family}-perturbed")


def save(family: str, folder: Path, seed: int = 0) -> None:
    """Write a checkpoint as it would be published: weights, tokenizer, image and video processor, settings."""
    oracle(family, seed).save_pretrained(folder)  # type: ignore[operator]
    made = processor(family)
    if not family_of(family).takes_images:
        made.save_pretrained(folder)
        return
    made.tokenizer.save_pretrained(folder)
    made.image_processor.save_pretrained(folder)
    settings = {name: value for name, value in made.to_dict().items() if name != "image_processor"}
    (folder / "processor_config.json").write_text(json.dumps(settings))


def picture(seed: int, family: str = "llava") -> NDArray[np.uint8]:
    """Random pixels (height, width, 3), the size chosen by the seed."""
    sizes_px = family_of(family).sizes_px
    height, width = sizes_px[seed % len(sizes_px)]
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def clip(seed: int, family: str) -> Clip:
    """Random frames, 2 to 5 of them, of a size and at a rate chosen by the seed."""
    generator = np.random.default_rng(900 + seed)
    sizes_px = family_of(family).sizes_px
    height, width = sizes_px[(seed + 1) % len(sizes_px)]
    num_frames, fps = 2 + seed % 4, (0.5, 2.0, 3.0)[seed % 3]
    frames = generator.integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
    return Clip(frames, tuple(number / fps for number in range(num_frames)), fps)


def with_video(family: str, text: str, seed: int) -> tuple[str, tuple[Clip, ...]]:
    """The prompt with a video at its end, for the families that take them."""
    placeholder = family_of(family).video_placeholder
    return (f"{text} {placeholder} w8", (clip(seed, family),)) if placeholder else (text, ())


def prompt(family: str, seed: int) -> tuple[str, tuple[NDArray[np.uint8], ...]]:
    """A prompt of its own length, with zero to two images for the families that take them."""
    generator = np.random.default_rng(seed)
    words = [f"w{i}" for i in generator.integers(4, VOCAB_SIZE, int(generator.integers(2, 12)))]
    num_images = int(generator.integers(0, 3)) if family_of(family).takes_images else 0
    for _ in range(num_images):
        words.insert(int(generator.integers(0, len(words))), family_of(family).placeholder)
    return " ".join(["<s>", *words]), tuple(picture(100 * seed + i, family) for i in range(num_images))
