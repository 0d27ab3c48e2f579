"""Check precomputed text features, the outputs of a text encoder for a prompt. Imports no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class FeaturesError(ValueError):
    """Raised for precomputed features that are invalid or do not fit the target."""


def check_features(values: Any, condition_dim: int, max_tokens: int) -> NDArray[np.float32]:
    """Convert features (l, condition_dim), an array or nested lists, to fp32; a leading axis of 1 is dropped.

    Raises FeaturesError for other shapes and types, too many rows, values that are not finite, and rows of zeros.
    """
    try:
        features = np.asarray(values)
        if features.dtype == object:  # how a nested Parquet list arrives
            features = np.stack([np.asarray(row) for row in values])
    except (TypeError, ValueError) as error:
        raise FeaturesError(f"the features are no matrix: {error}") from None
    if features.ndim == 3 and features.shape[0] == 1:
        features = features[0]
    if features.ndim != 2 or features.shape[1] != condition_dim:
        raise FeaturesError(f"features of shape {features.shape} do not fit (number of tokens, {condition_dim})")
    if not np.issubdtype(features.dtype, np.floating):
        raise FeaturesError(f"features must be floating-point numbers, not {features.dtype}")
    if not 1 <= len(features) <= max_tokens:
        raise FeaturesError(f"{len(features)} features, one per token; the model takes 1 to {max_tokens}")
    with np.errstate(over="ignore"):
        matrix = features.astype(np.float32)
    if not np.isfinite(matrix).all():
        raise FeaturesError("the features hold values that are not finite in float32")
    if padding := int((matrix == 0).all(axis=1).sum()):
        raise FeaturesError(f"{padding} of the features' {len(matrix)} rows are zeros, as only padding is: cut it off")
    return matrix
