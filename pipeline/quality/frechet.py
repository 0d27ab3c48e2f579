"""Fréchet distances of sets of image features, with jackknife errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

NUM_FOLDS = 8
"""Parts of the jackknife."""


def frechet_distance(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the squared Fréchet distance of two sets of features [n, d] taken as Gaussians (Heusel et al. 2017).

    Compare distances of equally many images only: it shrinks with their number.

    Raises:
        ValueError: a set has fewer than two members, another width, or numbers that are not finite.
    """
    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1] or min(len(first), len(second)) < 2:
        raise ValueError(
            f"two sets of two or more features of one width are needed, not {first.shape} and {second.shape}"
        )
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("features must be finite numbers")
    covariances = [np.atleast_2d(np.cov(features, rowvar=False)) for features in (first, second)]
    values, vectors = np.linalg.eigh(covariances[0])
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    # tr((A B)^½) by the symmetric matrix A^½ B A^½, whose eigenvalues are real.
    shared = np.sqrt(np.linalg.eigvalsh(root @ covariances[1] @ root).clip(0)).sum()
    gap = first.mean(0) - second.mean(0)
    return float(max(0.0, gap @ gap + np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * shared))


def leave_out(values: NDArray[np.float64], measure: Callable[[NDArray[np.float64]], float]) -> list[float]:
    """Return a measure of n values without each of `NUM_FOLDS` parts; no estimates for fewer than 4 values."""
    folds = min(NUM_FOLDS, len(values) // 2)
    if folds < 2:
        return []
    return [measure(values[np.arange(len(values)) % folds != fold]) for fold in range(folds)]


def jackknife(estimates: Sequence[float]) -> float:
    """Return the standard error of a measure by its estimates without one fold each; 0 without estimates."""
    folds = len(estimates)
    if folds < 2:
        return 0.0
    return math.sqrt((folds - 1) / folds * sum((estimate - sum(estimates) / folds) ** 2 for estimate in estimates))


def distance_folds(features: NDArray[np.float64], references: NDArray[np.float64]) -> tuple[float, list[float]]:
    """Return the distance of two sets of features, and the distances without each fold of the first."""
    return frechet_distance(features, references), leave_out(features, partial(frechet_distance, references))
