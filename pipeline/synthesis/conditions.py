"""Reads the condition of an image from one row: precomputed text features or a class label, as Arrow values or JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from configs.load import ConfigError
from models.llamagen.features import FeaturesError, check_features
from pipeline.formats import columns as column_types
from pipeline.prompts.sampling import integer_of
from pipeline.rows.schemas import RowError


def check_features_type(kind: pa.DataType, name: str) -> None:
    """Raise ConfigError if a column's type cannot hold features; `name` is the column."""
    inner, depth = _storage(kind), 0
    while column_types.is_list(inner) and depth < 2:
        inner, depth = _storage(inner.value_type), depth + 1
    is_encoded = depth == 0 and (column_types.is_bytes(inner) or column_types.is_text(inner))
    if is_encoded or (depth and pt.is_floating(inner)):
        return
    raise ConfigError(
        f"columns.features: {name!r} is {kind}; features are lists of floats (flat, or one per token), bytes or JSON"
    )


def _storage(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def read_features(cell: pa.Scalar, dtype: str, width: int, max_tokens: int) -> NDArray[np.float32]:
    """Read one row's features (num_tokens, width) without padding; RowError `invalid_condition` for invalid ones."""
    if isinstance(cell, pa.ExtensionScalar):
        cell = cell.value
    if cell is None or not cell.is_valid:
        raise RowError("invalid_condition", "the row has no features")
    try:
        numbers = _numbers(cell, dtype, width)
    except (ValueError, TypeError, OverflowError, RecursionError, pa.ArrowException) as error:
        raise RowError("invalid_condition", f"the features are no numbers: {error}") from None
    if numbers.ndim == 1:
        if numbers.size % width:
            raise RowError("invalid_condition", f"{numbers.size} numbers are no features of width {width}")
        numbers = numbers.reshape(-1, width)
    if numbers.ndim == 2:
        # Columns of a fixed shape have zero padding at the beginning or end; features of a token are never all zero.
        inside = np.flatnonzero(numbers.any(axis=1))
        numbers = numbers[inside[0] : inside[-1] + 1] if len(inside) else numbers[:0]
    try:
        return np.ascontiguousarray(check_features(numbers, width, max_tokens), dtype="<f4")
    except FeaturesError as error:
        raise RowError("invalid_condition", str(error)) from None


def _numbers(cell: pa.Scalar, dtype: str, width: int) -> NDArray[Any]:
    """Convert an Arrow value to a 1-D (flat) or 2-D array; raise ValueError for nulls and tokens of other widths."""
    if column_types.is_bytes(cell.type):
        data = cell.as_py()
        if dtype == "bfloat16":
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        return np.frombuffer(data, {"float32": "<f4", "float16": "<f2"}[dtype])
    if column_types.is_text(cell.type):
        array = np.array(json.loads(cell.as_py()))
        if array.dtype.kind not in "fiu":
            raise ValueError(f"values of type {array.dtype}")
        return array.astype(np.float64)
    values = cell.values
    while column_types.is_list(values.type):
        if values.null_count:
            raise ValueError("some tokens are null")
        fixed = pt.is_fixed_size_list(values.type)
        lengths = {values.type.list_size} if fixed else set(values.value_lengths().to_pylist())
        if lengths != {width}:
            raise ValueError(f"tokens of {sorted(lengths)} numbers, not {width}")
        values = values.flatten()
    if values.null_count:
        raise ValueError("some of them are null")
    return values.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def read_label(value: Any, num_classes: int) -> int:
    """Read a class label from 0 to `num_classes` - 1, also from text; raise RowError `invalid_condition` otherwise."""
    if value is None:
        raise RowError("invalid_condition", "the row has no class label")
    label = integer_of(value)
    if label is None or not 0 <= label < num_classes:
        raise RowError("invalid_condition", f"the class label {value!r:.100} is no number from 0 to {num_classes - 1}")
    return label
