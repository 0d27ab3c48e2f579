"""Bounds of source files in relation to their size, shared by all source kinds. None of them is a wall-clock time: each
counts bytes or rows, so that reading a piece again gives the same rows."""

from __future__ import annotations

TEXT_MAX_BYTES = 16 * 1024 * 1024
"""Maximum size of a line, of a text or JSON member of a tar sample, and of a column's value that contains no bytes."""
DATA_URI_FACTOR = 4
"""A data URI may have this many times the bytes that its medium may have."""
MAX_EXPANSION = 200
"""A compressed file may expand to this many times its size."""
MIN_EXPANDED_BYTES = 64 * 1024 * 1024
"""A compressed archive may always expand to this many bytes."""
MIN_SPAN_BYTES = 16 * 1024 * 1024
MAX_SPAN_EXPANSION = 8
"""The rows of a span may take this many times `source.span_max_bytes` (at least `MIN_SPAN_BYTES`) in memory."""
MAX_BLOCK_BYTES = 256 * 1024 * 1024
"""A compressed block that is decompressed as a whole (a page of Parquet, a batch of Arrow) may always expand to this
many bytes; a larger one to `MAX_SPAN_EXPANSION` times its size."""
MIN_MAX_ROWS = 4_000_000
MAX_ROWS_PER_BYTE = 20
"""A file, or a column chunk, may have this many rows or list elements per byte, and always `MIN_MAX_ROWS`."""
MAX_HEADER_BYTES = 1024 * 1024
"""Maximum size of all extended headers of a tar member, and of a map of a sparse member."""


def max_expanded(num_bytes: int, at_least: int = MIN_EXPANDED_BYTES) -> int:
    """Return the maximum expanded size of a compressed file of `num_bytes`."""
    return max(at_least, MAX_EXPANSION * num_bytes)


def max_block(num_bytes: int) -> int:
    """Return the maximum decompressed size of a block of `num_bytes`."""
    return max(MAX_BLOCK_BYTES, MAX_SPAN_EXPANSION * num_bytes)


def max_rows(num_bytes: int) -> int:
    """Return the maximum number of rows in `num_bytes` of a file."""
    return max(MIN_MAX_ROWS, MAX_ROWS_PER_BYTE * num_bytes)
