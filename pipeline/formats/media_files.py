"""Reads the source kinds `images` and `videos`: every file is one sample. Read tasks pass on only the paths of videos;
decoding tasks open them and may cut them (`source.video.clip_s`, `source.video.split`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from configs.load import ConfigError
from pipeline.formats import kind
from pipeline.formats.kind import Chunk, FilePiece, Needs, ReadSpec, Sample, SourceKind, Survey, VideoRef
from pipeline.formats.uris import read_file
from pipeline.rows.schemas import RowError
from pipeline.storage import access

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".jpe", ".jif", ".jfi", ".pjpeg", ".pjp", ".mpo", ".png", ".apng", ".webp", ".gif"),
    *(".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".jpf", ".jpx", ".avif"),
    *(".heic", ".heif", ".hif", ".jxl"),
)
"""Suffixes of all image formats (`media.pixels.FORMATS`), those of plugins included, and others of JPEG files."""
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".3gp", ".mkv", ".webm", ".avi", ".ts", ".m2ts", ".mts", ".mpg", ".mpeg", ".vob"),
    *(".flv", ".wmv", ".asf", ".ogv"),
)


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """Count one sample per file; ConfigError if the job needs any column."""
    for name, dotted in needs.columns().items():
        raise ConfigError(
            f"{dotted}: the column {name!r} is asked for, but source.kind {needs.source.kind!r} has no columns"
        )
    groups = [kind.no_row_groups(files.num_rows)] * 3
    return Survey(pa.table([pa.array(np.ones(files.num_rows, np.int64)), *groups], schema=kind.FACTS))


def read_image(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """Yield the file's bytes as one sample; a file that cannot be read becomes a row error."""
    sample = Sample(0)
    try:
        path = access.join(spec.root, piece.path)
        sample.images = [read_file(filesystem, path, access.shown(path), spec.source.max_image_bytes)]
    except RowError as error:
        sample.error = error
    yield Chunk([sample], [])


def read_video(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    yield Chunk([Sample(0, videos=[VideoRef(path=piece.path)])], [])


IMAGES = SourceKind("images", IMAGE_SUFFIXES, survey, read_image, cost=kind.SurveyCost.NOTHING)
VIDEOS = SourceKind("videos", VIDEO_SUFFIXES, survey, read_video, cost=kind.SurveyCost.NOTHING)
