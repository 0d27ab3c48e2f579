"""The source kind `videos`: every file is one video, and one sample unless `source.video.clip_s` cuts it into clips.

Only file names are passed on: files are opened by the decoding task.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from configs.load import ConfigError
from pipeline.sources.kind import Chunk, FilePiece, Kind, Needs, ReadSpec, Sample, Survey, VideoRef, no_row_groups

SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".3gp", ".mkv", ".webm", ".avi", ".ts", ".m2ts", ".mts", ".mpg", ".mpeg", ".vob"),
    *(".flv", ".wmv", ".asf", ".ogv"),
)


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """One sample per file.

    Raises:
        ConfigError: any column is asked for: video files have none.
    """
    for name, dotted in needs.columns().items():
        raise ConfigError(f"{dotted}: the column {name!r} is asked for, but source.kind 'videos' has no columns")
    num_samples = pa.array(np.ones(files.num_rows, np.int64))
    empty = no_row_groups(files.num_rows)
    return Survey(num_samples, empty, empty, pa.schema([]), empty)


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """The file's name as one sample."""
    yield Chunk([Sample(0, videos=[VideoRef(path=piece.path)])], [])


def count(filesystem: Any, spec: ReadSpec, path: str, at_most: int) -> int:
    """Always 1."""
    return 1


KIND = Kind("videos", SUFFIXES, survey, read, count)
