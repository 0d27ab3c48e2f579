"""The source kind `images`: every file is one sample with one image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from configs.load import ConfigError
from pipeline.rows.schemas import RowError
from pipeline.sources.kind import Chunk, FilePiece, Kind, Needs, ReadSpec, Sample, Survey, no_row_groups
from pipeline.storage import access

SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".jpe", ".jif", ".jfi", ".pjpeg", ".pjp", ".mpo", ".png", ".apng", ".webp", ".gif"),
    *(".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".jpf", ".jpx", ".avif"),
)
"""Suffixes of all formats that are decoded (`media.FORMATS`), other names of JPEG files among them. HEIC is not one."""


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """One sample per file.

    Raises:
        ConfigError: any column is asked for: image files have none.
    """
    for name, dotted in needs.columns().items():
        raise ConfigError(f"{dotted}: the column {name!r} is asked for, but source.kind 'images' has no columns")
    num_samples = pa.array(np.ones(files.num_rows, np.int64))
    empty = no_row_groups(files.num_rows)
    return Survey(num_samples, empty, empty, pa.schema([]), empty)


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """The file's bytes as one sample; a file that cannot be had is a row error."""
    sample = Sample(0)
    try:
        sample.images = [fetch(filesystem, access.join(spec.root, piece.path), spec.source.max_image_bytes)]
    except RowError as error:
        sample.error = error
    yield Chunk([sample], [])


def fetch(filesystem: Any, path: str, max_bytes: int) -> bytes:
    """One image file's bytes.

    Raises:
        RowError: `missing_image`, `unreadable_image` or `image_too_large`.
    """
    try:
        data = access.read_bounded(filesystem, path, max_bytes)
    except FileNotFoundError:
        raise RowError("missing_image", f"{access.shown(path)} does not exist") from None
    except Exception as error:  # drivers raise what they like: any failure is this row's, and only this row's
        message = f"{access.shown(path)} cannot be read: {access.reason_of(error)}"
        raise RowError("unreadable_image", message) from None
    if data is None:
        raise RowError("image_too_large", f"{access.shown(path)} has more than {max_bytes} bytes")
    return data


def count(filesystem: Any, spec: ReadSpec, path: str, at_most: int) -> int:
    """Always 1."""
    return 1


KIND = Kind("images", SUFFIXES, survey, read, count)
