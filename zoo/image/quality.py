"""Measures images: attributes that a captioner finds in them, and Fréchet distances of two sets.

Both measures take lists of uint8 images [H, W, 3] of any size. The reader is the shipped `caption_target`, in float32,
and the features are of its vision tower; it was not trained on grain or VQ images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.quality import answer_all, ask, count_matching, load_target
from zoo.world.grain import parse_prompt
from zoo.world.grammar import PROMPTS, parse_caption
from zoo.world.scene import Thing

# The guidance scale, of 1 to 6, at which a model's images fit their prompts best.
GUIDANCE = {"text": 2.0, "class": 2.0}
PHRASING = "inventory"
Seen = tuple[tuple[Thing, ...], str]
Reader = Target


@dataclass(frozen=True)
class Described:
    """Shares of images, and of attributes, that the captioner describes as the prompts request.

    An attribute is the tone, the presence of an object in a cell, or its size, colour or shape. Additional objects
    count against `whole` and not against `attributes`.
    """

    whole: float
    attributes: float


def load_reader(folder: Path = CHECKPOINTS) -> Reader:
    """Load the captioner from a folder of checkpoints."""
    return load_target(folder, "caption_target")


def read_images(reader: Reader, images: Sequence[np.ndarray]) -> list[Seen | None]:
    """Return the objects and the tone that the captioner reads in each image; None without a valid caption."""
    answers = answer_all(reader, [ask(PROMPTS[PHRASING], [Image.fromarray(image)], "") for image in images])
    return [caption and (caption[1][0], caption[1][1]) for caption in map(parse_caption, answers)]


def measure_described(reader: Reader, images: Sequence[np.ndarray], prompts: Sequence[str]) -> Described:
    """Compare captions of images with their prompts. Raises ValueError if there is not one prompt per image, or a
    prompt of another world."""
    whole = right = asked = 0
    for prompt, seen in zip(prompts, read_images(reader, images), strict=True):
        wanted = parse_prompt(prompt)
        if wanted is None:
            raise ValueError(f"not a prompt of the grainy world: {prompt!r}")
        whole += wanted == seen
        right += count_right(wanted, seen)
        asked += 1 + 4 * len(wanted[0])
    return Described(whole / len(images), right / asked)


def count_right(wanted: Seen, seen: Seen | None) -> int:
    """Return how many of the wanted attributes were read; see `Described`."""
    if seen is None:
        return 0
    return int(wanted[1] == seen[1]) + count_matching(wanted[0], seen[0])


@torch.no_grad()
def image_features(reader: Reader, images: Sequence[np.ndarray], batch_size: int = 50) -> np.ndarray:
    """Return float64 features [n, 256] of images: mean and standard deviation over the tower's patches."""
    model: Any = reader.model
    tower, prepare = model.model.vision_tower, reader.front_end.processor.image_processor
    parts = []
    for start in range(0, len(images), batch_size):
        some = [Image.fromarray(image) for image in images[start : start + batch_size]]
        patches = tower(prepare(some, return_tensors="pt")["pixel_values"]).last_hidden_state[:, 1:].double()
        parts.append(torch.cat([patches.mean(1), patches.std(1)], dim=1).numpy())
    return np.concatenate(parts)
