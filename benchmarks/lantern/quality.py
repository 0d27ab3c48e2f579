"""Measures image quality: attributes read by a captioner, Fréchet distances, standard errors; replaces codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness.verdict import ratio_error
from pipeline.quality.frechet import distance_folds, jackknife
from zoo.image.quality import Reader, Seen, count_right, image_features, read_images
from zoo.world.grain import parse_prompt

Score = Callable[[Seen | None], tuple[bool, int, int]]
"""Contents that the captioner read → (whether all is right, attributes right, attributes requested)."""


@dataclass(frozen=True)
class Judge:
    """Reads images with the zoo's captioner and its vision tower."""

    reader: Reader

    def read(self, images: Sequence[NDArray[np.uint8]]) -> list[Seen | None]:
        """Return the contents of each image; None if nothing could be read."""
        return read_images(self.reader, images)

    def features(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float64]:
        """Return features (n, d) of images."""
        return image_features(self.reader, images)


def count_prompt(prompt: str) -> Score:
    """Return the score of a text-conditional image; raise ValueError for a prompt of another world."""
    wanted = parse_prompt(prompt)
    if wanted is None:
        raise ValueError(f"not a prompt of the grainy world: {prompt!r}")

    def score(seen: Seen | None) -> tuple[bool, int, int]:
        return seen == wanted, count_right(wanted, seen), 1 + 4 * len(wanted[0])

    return score


def count_class(colour: str, shape: str) -> Score:
    """Return the score of a class-conditional image: one object, of this colour and this shape."""

    def score(seen: Seen | None) -> tuple[bool, int, int]:
        things = seen[0] if seen else ()
        right = max(((thing.colour == colour) + (thing.shape == shape) for thing in things), default=0)
        return len(things) == 1 and right == 2, right, 2

    return score


def measure_quality(
    judge: Judge,
    images: Sequence[NDArray[np.uint8]],
    scores: Sequence[Score],
    references: dict[str, NDArray[np.float64]],
) -> dict[str, Any]:
    """Return shares of right images and attributes, and Fréchet distances to `references`, with errors `…_se`.

    `frechet_NAME_folds` are the distances without one fold each, which pair two rows; `samples` has the counts of each
    image.
    """
    scored = [score(seen) for score, seen in zip(scores, judge.read(images), strict=True)]
    all_right, right, stated = zip(*scored, strict=True)
    share = sum(all_right) / len(scored)
    results: dict[str, Any] = {
        "whole": share,
        "whole_se": math.sqrt(share * (1 - share) / len(scored)),
        "attributes": sum(right) / sum(stated),
        "attributes_se": ratio_error(right, stated),
        "samples": {"whole": list(all_right), "num_right": list(right), "num_stated": list(stated)},
    }
    features = judge.features(images)
    for name, reference in references.items():
        results[f"frechet_{name}"], folds = distance_folds(features, reference)
        results[f"frechet_{name}_folds"] = folds
        results[f"frechet_{name}_se"] = jackknife(folds)
    return results


def replace_codes(codes: NDArray[np.int32], table: Tensor, column: int) -> NDArray[np.int32]:
    """Replace every code of (n, grid²) by its neighbour in a column of the table (V, k), the nearest in column 0."""
    return table[:, column].numpy().astype(np.int32)[codes]


def draw_neighbours(codes: NDArray[np.int32], table: Tensor, k: int, seed: int) -> NDArray[np.int32]:
    """Replace every code of (n, grid²) by a uniform draw from itself and its `k` - 1 nearest codes (Figure 3)."""
    drawn = np.random.default_rng(seed).integers(0, k, size=codes.shape)
    near = np.concatenate([np.arange(len(table))[:, None], table[:, : k - 1].numpy()], axis=1)
    return near[codes, drawn].astype(np.int32)


def signal_to_noise(images: Sequence[NDArray[np.uint8]], others: Sequence[NDArray[np.uint8]]) -> float:
    """Return the peak signal-to-noise ratio of two lists of images, in dB; infinite if they are equal."""
    gap = np.mean([(image.astype(np.float64) - other) ** 2 for image, other in zip(images, others, strict=True)])
    return float(10 * np.log10(255.0**2 / gap)) if gap else math.inf
