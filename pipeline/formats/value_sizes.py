"""Computes the decoded size of values from the offsets of their arrays, before anything is decoded: values may share
bytes, so a few values of dictionaries, views and lists can refer to terabytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

Sizes = NDArray[np.float64]
"""Bytes, as floats: sums of nested views can exceed 64 bits."""
Indices = NDArray[np.int64]
_VIEW_BYTES = 16


def value_bytes(values: pa.Array, item_bytes: int = 1) -> Sizes:
    """Return the decoded bytes of every value, 0 for null. An item of a list counts `item_bytes` beside its content."""
    indices = np.arange(len(values), dtype=np.int64)
    sizes = range_bytes(values, indices, indices + 1, item_bytes)
    return sizes if not values.null_count else np.where(_is_valid(values), sizes, 0.0)


def range_bytes(values: pa.Array, starts: Indices, stops: Indices, item_bytes: int) -> Sizes:
    """Return the decoded bytes of the values of each range; `stops` are exclusive."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        return range_bytes(values.storage, starts, stops, item_bytes)
    if not len(values) or not (stops > starts).any():
        return np.zeros(len(starts))
    if pt.is_struct(kind):
        total = np.zeros(len(starts))
        for index in range(kind.num_fields):
            total += range_bytes(values.field(index), starts, stops, item_bytes)
        return total
    if pt.is_fixed_size_list(kind):
        size, offset = kind.list_size, values.offset
        return _items_bytes(values.values, (offset + starts) * size, (offset + stops) * size, item_bytes)
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_map(kind):
        offsets = values.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        return _items_bytes(_items(values), offsets[starts], offsets[stops], item_bytes)
    if pt.is_string(kind) or pt.is_binary(kind):
        return _offset_differences(values, np.int32, starts, stops)
    if pt.is_large_string(kind) or pt.is_large_binary(kind):
        return _offset_differences(values, np.int64, starts, stops)
    if pt.is_run_end_encoded(kind):
        return _run_bytes(values, starts, stops, item_bytes)
    each = _each(values, item_bytes)
    if each is None:
        return np.asarray((stops - starts) * _width(kind), np.float64)
    ends = np.append(0.0, np.cumsum(each))
    return np.asarray(ends[stops] - ends[starts])


def _items_bytes(items: pa.Array, starts: Indices, stops: Indices, item_bytes: int) -> Sizes:
    return (stops - starts) * float(item_bytes) + range_bytes(items, starts, stops, item_bytes)


def _each(values: pa.Array, item_bytes: int) -> Sizes | None:
    """Return the bytes of the content of each value of a type whose values share bytes; None for other types."""
    kind = values.type
    if pt.is_dictionary(kind):
        indices = values.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        if not len(values.dictionary):
            return np.zeros(len(values))
        item_sizes = range_bytes(values.dictionary, indices, indices + 1, item_bytes)
        return np.where(_is_valid(values), item_sizes, 0.0)
    if pt.is_string_view(kind) or pt.is_binary_view(kind):
        views = np.frombuffer(values.buffers()[1], np.int32).reshape(-1, _VIEW_BYTES // 4)
        sizes = views[values.offset : values.offset + len(values), 0]
        return np.where(_is_valid(values), sizes.astype(np.float64), 0.0)
    if pt.is_list_view(kind) or pt.is_large_list_view(kind):
        starts, counts = (
            np.where(_is_valid(values), part.to_numpy(zero_copy_only=False), 0).astype(np.int64)
            for part in (values.offsets, values.sizes)
        )
        return _items_bytes(values.values, starts, starts + counts, item_bytes)
    if pt.is_union(kind):
        codes, each = values.type_codes.to_numpy(), np.zeros(len(values))
        for number, code in enumerate(kind.type_codes):
            chosen = np.flatnonzero(codes == code)
            indices = values.offsets.to_numpy().astype(np.int64)[chosen] if kind.mode == "dense" else chosen
            each[chosen] = range_bytes(values.field(number), indices, indices + 1, item_bytes)
        return each
    return None


def _run_bytes(values: pa.Array, starts: Indices, stops: Indices, item_bytes: int) -> Sizes:
    """Return the bytes of ranges of a run-end encoded array, which may be much longer than its runs."""
    ends = np.append(0.0, values.run_ends.to_numpy(zero_copy_only=False))
    runs = np.arange(len(values.values), dtype=np.int64)
    sizes = range_bytes(values.values, runs, runs + 1, item_bytes)
    totals = np.append(0.0, np.cumsum(sizes * np.diff(ends)))

    def before(indices: Indices) -> Sizes:
        inside = indices + values.offset
        run = np.minimum(np.searchsorted(ends, inside, side="right") - 1, len(sizes) - 1)
        return np.asarray(totals[run] + (inside - ends[run]) * sizes[run])

    return before(stops) - before(starts)


def _is_valid(values: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(values.is_valid())


def _items(values: pa.Array) -> pa.Array:
    """Return the items of a list array; those of a map are its entries."""
    if not pt.is_map(values.type):
        return values.values
    return pa.StructArray.from_arrays([values.keys, values.items], ["key", "value"])


def _offset_differences(values: pa.Array, dtype: Any, starts: Indices, stops: Indices) -> Sizes:
    offsets = np.frombuffer(values.buffers()[1], dtype)[values.offset :].astype(np.float64)
    return np.asarray(offsets[stops] - offsets[starts])


def _width(kind: pa.DataType) -> float:
    """Return the bytes of a value of a type of fixed width, and 16 for types that are not known here."""
    if pt.is_null(kind):
        return 0.0
    try:
        return float(kind.bit_width) / 8
    except ValueError:
        return 16.0
