"""Measures images of the grainy world: attributes that the zoo's captioner finds, and Fréchet distances of two sets.

Both measures take lists of uint8 images [H, W, 3] of any size. The captioner and the features are the shipped
`caption_target` and its vision tower, which were not trained on grain or VQ images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration, LlavaProcessor

from zoo.pair import CHECKPOINTS
from zoo.quality import answer_all, ask, count_matching, load_captioner
from zoo.world.grain import parse_prompt
from zoo.world.grammar import PROMPTS, parse_caption
from zoo.world.scene import COLOURS, SHAPES, Thing

PHRASING = "inventory"
Seen = tuple[tuple[Thing, ...], str]


@dataclass(frozen=True)
class Reader:
    """The captioner that reads images: model and processor, in float32."""

    model: LlavaForConditionalGeneration
    processor: LlavaProcessor


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
    return Reader(load_captioner(folder, "target"), AutoProcessor.from_pretrained(folder / "caption_target"))


def read_images(reader: Reader, images: Sequence[np.ndarray], batch_size: int = 50) -> list[Seen | None]:
    """Return the objects and the tone that the captioner reads in each image; None without a valid caption.

    The ground's texture is left out: the captioner, which was not trained on grain, reads it as dots.
    """
    questions = [ask(PROMPTS[PHRASING], [Image.fromarray(_checked(image))], "") for image in images]
    answers = answer_all(reader.model, reader.processor, questions, batch_size)
    parsed = [parse_caption(answer.text) for answer in answers]
    return [caption and (caption[1][0], caption[1][1]) for caption in parsed]


def measure_described(reader: Reader, images: Sequence[np.ndarray], prompts: Sequence[str]) -> Described:
    """Compare captions of images with their prompts.

    Raises:
        ValueError: there is no image, not one prompt per image, or a prompt of another world.
    """
    _check_counts(images, prompts, "prompts")
    whole = right = asked = 0
    for wanted, seen in zip(map(_wanted, prompts), read_images(reader, images)):
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
    tower, prepare = reader.model.model.vision_tower, reader.processor.image_processor
    parts = []
    for start in range(0, len(images), batch_size):
        some = [Image.fromarray(_checked(image)) for image in images[start : start + batch_size]]
        patches = tower(prepare(some, return_tensors="pt")["pixel_values"]).last_hidden_state[:, 1:].double()
        parts.append(torch.cat([patches.mean(1), patches.std(1)], dim=1).numpy())
    return np.concatenate(parts)


def frechet_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the squared Fréchet distance of two sets of features [n, d] taken as Gaussians (Heusel et al. 2017).

    Compare distances of equally many images only: it shrinks with their number.

    Raises:
        ValueError: a set has fewer than two members, another width, or numbers that are not finite.
    """
    if one.ndim != 2 or other.ndim != 2 or one.shape[1] != other.shape[1] or min(len(one), len(other)) < 2:
        raise ValueError(f"two sets of two or more features of one width are needed, not {one.shape} and {other.shape}")
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise ValueError("features must be finite numbers")
    covariances = [np.atleast_2d(np.cov(features, rowvar=False)) for features in (one, other)]
    values, vectors = np.linalg.eigh(covariances[0])
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    # tr((A B)^½) by the symmetric matrix A^½ B A^½, whose eigenvalues are real.
    shared = np.sqrt(np.linalg.eigvalsh(root @ covariances[1] @ root).clip(0)).sum()
    gap = one.mean(0) - other.mean(0)
    return float(max(0.0, gap @ gap + np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * shared))


def measure_class(reader: Reader, images: Sequence[np.ndarray], labels: Sequence[int]) -> Described:
    """Compare captions of class-conditional images with their classes: one object, of its colour and its shape.

    Raises:
        ValueError: there is no image, or not one label per image.
    """
    _check_counts(images, labels, "labels")
    whole = right = 0
    for label, seen in zip(labels, read_images(reader, images)):
        colour, shape = COLOURS[label // len(SHAPES)], SHAPES[label % len(SHAPES)]
        found = [(thing.colour == colour) + (thing.shape == shape) for thing in seen[0]] if seen else [0]
        whole += found == [2]
        right += max(found)
    return Described(whole / len(images), right / (2 * len(images)))


def _wanted(prompt: str) -> Seen:
    wanted = parse_prompt(prompt)
    if wanted is None:
        raise ValueError(f"not a prompt of the grainy world: {prompt!r}")
    return wanted


def _checked(image: np.ndarray) -> np.ndarray:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"an image must be uint8 [height, width, 3], not {image.dtype} {list(image.shape)}")
    return image


def _check_counts(images: Sequence[np.ndarray], others: Sequence[object], noun: str) -> None:
    if len(images) != len(others) or not images:
        raise ValueError(f"{len(images)} images and {len(others)} {noun}: as many are needed, and at least one")
