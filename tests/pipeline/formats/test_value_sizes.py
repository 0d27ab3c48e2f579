"""Sizes of values before they are decoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.formats.value_sizes import value_bytes
from tests.pipeline.formats.false_headers import nested_views, repeated

ITEM_BYTES = 8


def size_of(value: Any) -> int:
    """The bytes of a Python value: UTF-8 of text, 8 of an integer, and 8 more of an item."""
    if value is None:
        return 0
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, list):
        return sum(ITEM_BYTES + size_of(item) for item in value)
    return sum(map(size_of, value.values())) if isinstance(value, dict) else 8


TEXTS = st.none() | st.text(max_size=20)
CASES: dict[str, tuple[pa.DataType, Any]] = {
    "text": (pa.string(), TEXTS),
    "large text": (pa.large_string(), TEXTS),
    "views": (pa.string_view(), TEXTS),
    "bytes": (pa.binary(), st.none() | st.binary(max_size=20)),
    "integers": (pa.int64(), st.none() | st.integers(-9, 9)),
    "lists": (pa.list_(pa.string()), st.none() | st.lists(TEXTS, max_size=4)),
    "lists of lists": (pa.large_list(pa.list_(pa.string())), st.none() | st.lists(st.lists(TEXTS, max_size=3))),
    "lists of views": (pa.list_view(pa.string_view()), st.none() | st.lists(TEXTS, max_size=4)),
    "fixed lists": (pa.list_(pa.string(), 2), st.lists(TEXTS, min_size=2, max_size=2)),
    "structs": (
        pa.struct([("a", pa.string()), ("b", pa.list_(pa.binary()))]),
        st.fixed_dictionaries({"a": TEXTS, "b": st.none() | st.lists(st.binary(max_size=9), max_size=3)}),
    ),
}


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_sizes_are_those_of_the_decoded_values(name, data) -> None:
    kind, values = CASES[name]
    rows = data.draw(st.lists(values, max_size=12))
    low = data.draw(st.integers(0, len(rows)))
    array = pa.array(rows, kind)
    if name not in ("views", "lists of views"):  # without nulls below nulls, which count here
        dictionary = repeated(rows, list(range(len(rows)))[::-1], kind).slice(low)
        assert value_bytes(dictionary, ITEM_BYTES).tolist() == [size_of(row) for row in rows[::-1][low:]]
    assert value_bytes(array.slice(low), ITEM_BYTES).tolist() == [size_of(row) for row in rows[low:]]


def test_values_that_share_bytes_count_each_time() -> None:
    assert value_bytes(repeated(["x" * 1000, "y"], [0, 0, 1], pa.string())).tolist() == [1000, 1000, 1]
    assert value_bytes(pa.ListArray.from_arrays([0, 3], repeated(["x" * 10], [0] * 3, pa.string())), 0).tolist() == [30]
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 2_000_000], pa.int32()), pa.array(["x" * 10, "yy"]))
    assert value_bytes(runs.slice(1, 3)).tolist() == [10, 2, 2]
    assert value_bytes(pa.FixedSizeListArray.from_arrays(runs.slice(0, 9), 3), 0).tolist() == [22, 6, 6]
    shared = pa.UnionArray.from_dense(pa.array([0, 0], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array(["x" * 9])])
    assert value_bytes(shared).tolist() == [9, 9]


def test_sizes_beyond_64_bits_and_lists_of_nothing_are_computed_without_memory() -> None:
    before = pa.total_allocated_bytes()
    assert value_bytes(nested_views(30), 0)[0] > 1e30
    nulls = pa.FixedSizeListArray.from_arrays(pa.nulls(2 * 10**9), 10**9)
    assert value_bytes(nulls, ITEM_BYTES).tolist() == [8e9, 8e9]
    assert pa.total_allocated_bytes() - before < 10**6


def test_values_of_an_extension_type_are_those_of_its_storage() -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((3, 4), np.float32))
    assert value_bytes(tensors, 0).tolist() == [16, 16, 16]
