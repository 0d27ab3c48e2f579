"""Hashes ids to 64 bits, equal in all processes and on all machines, without a Python object per id."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

LONG_BYTES = 256
"""Longer ids are hashed one by one with BLAKE2b; shorter ones by words of 8 bytes, all at a time."""
_WORD_BYTES = 8
_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_FINAL = np.uint64(0x94D049BB133111EB)


def hash_ids(ids: pa.Array) -> Hashes:
    """Return the hash of every id; `ids` is a `large_string` array without nulls."""
    if not len(ids):
        return np.zeros(0, np.uint64)
    _, offset_buffer, data = ids.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[ids.offset : ids.offset + len(ids) + 1]
    first = int(offsets[0])
    starts, lengths = offsets[:-1] - first, np.diff(offsets)
    num_bytes = int(offsets[-1]) - first
    padded = np.zeros(num_bytes + _WORD_BYTES, np.uint8)
    if num_bytes:
        padded[:num_bytes] = np.frombuffer(data, np.uint8)[first : first + num_bytes]
    words = np.ndarray((num_bytes + 1,), np.dtype("<u8"), padded.data, strides=(1,))
    hashes = lengths.astype(np.uint64) * _SEED
    is_long = lengths > LONG_BYTES
    for index in np.flatnonzero(is_long).tolist():
        content = padded[starts[index] : starts[index] + lengths[index]]
        hashes[index] = int.from_bytes(hashlib.blake2b(content.tobytes(), digest_size=8).digest(), "little")
    remaining = np.where(is_long, 0, lengths)
    rows = np.flatnonzero(remaining > 0)
    for position in range(0, LONG_BYTES, _WORD_BYTES):
        if not len(rows):
            break
        num_left = remaining[rows] - position
        word = words[starts[rows] + position]
        short = num_left < _WORD_BYTES
        word[short] &= (np.uint64(1) << (8 * num_left[short]).astype(np.uint64)) - np.uint64(1)
        hashes[rows] = _mixed(hashes[rows] ^ word)
        rows = rows[num_left > _WORD_BYTES]
    return hashes


def _mixed(values: Hashes) -> Hashes:
    """Apply the finalizer of SplitMix64, a bijection of 64 bits; the additive constant separates successive words."""
    values = values + _SEED
    values = (values ^ (values >> np.uint64(30))) * _MIX
    values = (values ^ (values >> np.uint64(27))) * _FINAL
    return values ^ (values >> np.uint64(31))
