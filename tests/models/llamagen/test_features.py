"""Ready text features: any float type and nesting becomes a matrix, and what no target takes is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.llamagen.features import FeaturesError, check_features

WIDTH = 16


def matrix(rows: int = 3, dtype: Any = np.float32) -> Any:
    return (np.random.default_rng(4).standard_normal((rows, WIDTH)) + 3).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ready_features_of_any_float_type_become_float32(dtype: Any) -> None:
    features = check_features(matrix(dtype=dtype), WIDTH, 120)
    assert features.dtype == np.float32
    np.testing.assert_array_equal(features, matrix(dtype=dtype).astype(np.float32))


def test_features_as_parquet_and_as_the_published_files_hold_them_are_read() -> None:
    rows = np.empty(3, dtype=object)
    rows[:] = list(matrix())
    for form in (matrix().tolist(), list(matrix()), rows, matrix()[None]):
        np.testing.assert_allclose(check_features(form, WIDTH, 120), matrix())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (matrix()[0], r"shape \(16,\) do not fit \(number of tokens, 16\)"),
        (matrix()[:, :5], r"shape \(3, 5\) do not fit"),
        (np.stack([matrix(), matrix()]), r"shape \(2, 3, 16\) do not fit"),
        (matrix(0), "^0 features, one per token; the model takes 1 to 120"),
        (matrix(121), "^121 features"),
        (np.ones((3, WIDTH), dtype=np.int64), "must be floating-point numbers, not int64"),
        (np.full((3, WIDTH), "x"), "must be floating-point numbers"),
        (np.ones((3, WIDTH), dtype=complex), "must be floating-point numbers, not complex128"),
        (np.where(np.arange(WIDTH) == 2, np.nan, matrix()), "not finite"),
        (matrix(dtype=np.float64) * 1e300, "not finite in float32"),
        ([[1.0] * WIDTH, [1.0]], "are no matrix"),
        (None, "are no matrix"),
        ("features", "shape"),
        ([None, None], "are no matrix|shape"),
        (
            np.concatenate([matrix(), np.zeros((2, WIDTH))]),
            "2 of the features' 5 rows are zeros, as only padding is",
        ),
    ],
)
def test_ready_features_that_cannot_be_a_texts_are_refused(values: Any, message: str) -> None:
    with pytest.raises(FeaturesError, match=message):
        check_features(values, WIDTH, 120)
