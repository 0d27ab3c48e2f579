"""The source kinds `images` and `videos`: every file is one sample with one image, or with one video.

Videos are passed on by name: their files are opened by the decoding task, which may cut them (`source.video.clip_s`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from configs.load import ConfigError
from pipeline.rows.schemas import RowError
from pipeline.sources.kind import (
    FACTS,
    Chunk,
    FilePiece,
    Kind,
    Needs,
    ReadSpec,
    Sample,
    Survey,
    VideoRef,
    no_row_groups,
)
from pipeline.sources.uris import read_file
from pipeline.storage import access

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".jpe", ".jif", ".jfi", ".pjpeg", ".pjp", ".mpo", ".png", ".apng", ".webp", ".gif"),
    *(".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".jpf", ".jpx", ".avif"),
)
"""Suffixes of all formats that are decoded (`media.pixels.FORMATS`), other names of JPEG files among them."""
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".3gp", ".mkv", ".webm", ".avi", ".ts", ".m2ts", ".mts", ".mpg", ".mpeg", ".vob"),
    *(".flv", ".wmv", ".asf", ".ogv"),
)


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """One sample per file; ConfigError if any column is needed."""
    for name, dotted in needs.columns().items():
        kind = needs.source.kind
        raise ConfigError(f"{dotted}: the column {name!r} is asked for, but source.kind {kind!r} has no columns")
    empty = no_row_groups(files.num_rows)
    columns = [pa.array(np.ones(files.num_rows, np.int64)), empty, empty, empty]
    return Survey(pa.table(columns, schema=FACTS), pa.schema([]))


def read_image(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """The file's bytes as one sample; a file that cannot be read is a row error."""
    sample = Sample(0)
    try:
        path = access.join(spec.root, piece.path)
        sample.images = [read_file(filesystem, path, access.shown(path), spec.source.max_image_bytes)]
    except RowError as error:
        sample.error = error
    yield Chunk([sample], [])


def read_video(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """The file's name as one sample."""
    yield Chunk([Sample(0, videos=[VideoRef(path=piece.path)])], [])


IMAGES = Kind("images", IMAGE_SUFFIXES, survey, read_image)
VIDEOS = Kind("videos", VIDEO_SUFFIXES, survey, read_video)
