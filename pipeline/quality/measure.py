"""Measures images of a synthesis output with a scorer: agreement with prompts, and distance to references."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.load import ConfigError
from models.scorer import Scorer, cosines
from pipeline.media.image_decoding import decode_image
from pipeline.output.recorded_job import RecordedJob
from pipeline.quality.frechet import distance_folds, jackknife
from pipeline.reports.intervals import CONFIDENCE, student_quantile
from pipeline.rows.schemas import RowError
from pipeline.storage import access

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MIN_IMAGES = 8
MAX_PIXELS = 64_000_000
MAX_IMAGE_BYTES = 256_000_000
COLUMNS = ("sample_id", "prompt", "image")
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class QualityFigure:
    """A value with half of the width of its 95 % interval."""

    value: float
    margin: float

    def decides(self) -> bool:
        """Return whether the interval excludes zero."""
        return abs(self.value) > self.margin


@dataclass(frozen=True)
class ImageFeatures:
    """Image features (n, d) and agreements (n,) of an output, by sample id."""

    ids: tuple[str, ...]
    images: NDArray[np.float64]
    agreement: NDArray[np.float64]

    def only(self, ids: Sequence[str]) -> ImageFeatures:
        """Return the samples with these ids, in their order."""
        place = {name: index for index, name in enumerate(self.ids)}
        chosen = [place[name] for name in ids]
        return ImageFeatures(tuple(ids), self.images[chosen], self.agreement[chosen])


@dataclass(frozen=True)
class Quality:
    """Quality of `num_images` images: cosine to the prompt, and squared Fréchet distance to the references.

    `detectable` is the smallest change of the distance, as a share of it, that two outputs of as many images decide
    without pairs.
    """

    num_images: int
    agreement: QualityFigure
    distance: QualityFigure | None
    folds: tuple[float, ...] = ()

    @property
    def detectable(self) -> float | None:
        if self.distance is None or not self.distance.value:
            return None
        return math.sqrt(2) * self.distance.margin / self.distance.value


@dataclass(frozen=True)
class Difference:
    """The first output's quality less the second's, over the samples that both have."""

    num_images: int
    agreement: QualityFigure
    distance: QualityFigure | None


def quantile(num: int) -> float:
    """Return the factor of the standard error in a 95 % interval over `num` samples, Student's t."""
    return student_quantile(CONFIDENCE, max(1, num - 1))


def read_images(job: RecordedJob[Any], dotted: str, limit: int) -> Iterator[tuple[str, str, Pixels]]:
    """Yield (sample id, prompt, pixels) of the first `limit` images of an output; images without prompt are skipped.

    Raises:
        ConfigError: the output makes no images, or keeps none.
    """
    if not job.makes_images or not job.config.sink.images:
        reason = "was made with sink.images: false" if job.makes_images else "holds captions"
        raise ConfigError(f"{dotted}: {job.output.shown()} {reason}, so it holds no images")
    num = 0
    for table in job.results(COLUMNS, dotted):
        for row in table.to_pylist():
            data = (row["image"] or {}).get("bytes")
            if num >= limit or not data or not row["prompt"]:
                continue
            num += 1
            yield row["sample_id"], row["prompt"], decode_image(data, max_pixels=MAX_PIXELS)


def read_references(folder: str, dotted: str, limit: int) -> Iterator[Pixels]:
    """Yield the first `limit` images of a folder, by name; files that are no images are an error.

    Raises:
        ConfigError: the folder cannot be read, or a file is not an image.
    """
    with access.refusals(dotted, folder):
        filesystem, root = access.open_url(folder, dotted)
        if not filesystem.isdir(root):
            raise ConfigError(f"{dotted}: {access.shown(folder)} is not a folder")
        names = sorted(name for name in filesystem.find(root) if name.lower().endswith(SUFFIXES))
        for name in names[:limit]:
            with filesystem.open(name, "rb") as file:
                data = file.read(MAX_IMAGE_BYTES + 1)
            if len(data) > MAX_IMAGE_BYTES:
                raise ConfigError(f"{dotted}: {access.shown(name)} is larger than {MAX_IMAGE_BYTES:,} bytes")
            try:
                yield decode_image(data, max_pixels=MAX_PIXELS)
            except RowError as error:
                raise ConfigError(f"{dotted}: {access.shown(name)} is not an image: {error}") from None


def features_of(scorer: Scorer, rows: Iterator[tuple[str, str, Pixels]], batch: int = 64) -> ImageFeatures:
    """Return the features of an output, read `batch` images at a time."""
    ids: list[str] = []
    parts: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    waiting: list[tuple[str, str, Pixels]] = []

    def flush() -> None:
        if waiting:
            images = scorer.image_features([pixels for _, _, pixels in waiting])
            parts.append((images, cosines(images, scorer.text_features([prompt for _, prompt, _ in waiting]))))
            ids.extend(name for name, _, _ in waiting)
            waiting.clear()

    for row in rows:
        waiting.append(row)
        if len(waiting) == batch:
            flush()
    flush()
    if not parts:
        return ImageFeatures((), np.zeros((0, 0)), np.zeros(0))
    images, agreement = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    return ImageFeatures(tuple(ids), images, agreement)


def reference_features(scorer: Scorer, images: Iterator[Pixels], batch: int = 64) -> NDArray[np.float64]:
    """Return the features (n, d) of reference images, read `batch` images at a time."""
    parts, waiting = [], []
    for image in images:
        waiting.append(image)
        if len(waiting) == batch:
            parts.append(scorer.image_features(waiting))
            waiting = []
    if waiting:
        parts.append(scorer.image_features(waiting))
    return np.concatenate(parts) if parts else np.zeros((0, 0))


def measure(features: ImageFeatures, references: NDArray[np.float64] | None) -> Quality:
    """Return the quality of an output."""
    distance: QualityFigure | None = None
    folds: list[float] = []
    if references is not None:
        value, folds = distance_folds(features.images, references)
        distance = QualityFigure(value, quantile(len(folds)) * jackknife(folds))
    return Quality(len(features.ids), _mean(features.agreement), distance, tuple(folds))


def compare(own: ImageFeatures, other: ImageFeatures, references: NDArray[np.float64] | None) -> Difference:
    """Return the difference of two outputs over the samples that both have, paired.

    Raises:
        ConfigError: they have fewer than `MIN_IMAGES` samples in common.
    """
    common = sorted(set(own.ids) & set(other.ids))
    if len(common) < MIN_IMAGES:
        raise ConfigError(f"OTHER: it has {len(common)} images of the same ids, and {MIN_IMAGES} are needed")
    sides = own.only(common), other.only(common)
    distance = None
    if references is not None:
        (first, folds), (second, others) = (distance_folds(side.images, references) for side in sides)
        gaps = [a - b for a, b in zip(folds, others, strict=True)]
        distance = QualityFigure(first - second, quantile(len(gaps)) * jackknife(gaps))
    return Difference(len(common), _mean(sides[0].agreement - sides[1].agreement), distance)


def _mean(values: NDArray[np.float64]) -> QualityFigure:
    num = len(values)
    error = float(values.std(ddof=1)) / math.sqrt(num) if num > 1 else math.inf
    return QualityFigure(float(values.mean()), quantile(num) * error)
