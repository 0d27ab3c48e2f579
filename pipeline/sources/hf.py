"""The source kind `hf`: folders in the layouts of Hugging Face's `datasets`.

    data/train-00000-of-00002.parquet …              files of the hub: images as `struct<bytes, path>`
    data-00000-of-00002.arrow, state.json            files of `save_to_disk`
    train/metadata.csv (.jsonl, .parquet), *.jpg …   image and video folders: rows are the metadata's

The format is that of the first file; its own module reads it.
"""

from __future__ import annotations

import itertools
import json
import posixpath
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.load import ConfigError
from pipeline.sources import arrow, csv, jsonl, parquet
from pipeline.sources.kind import Chunk, FilePiece, Kind, Needs, ReadSpec, Sample, Survey, VideoRef
from pipeline.sources.uris import scheme_of
from pipeline.storage import access

METADATA = "metadata."
FILE_NAME = "file_name"
FEATURES_KEY = b"huggingface"
READERS = {".arrow": arrow, ".parquet": parquet, ".jsonl": jsonl, ".csv": csv}
LEFT_OVER = ("cache-", "tmp")
"""How the names of files begin that `datasets` leaves beside its own."""


def _suffix(path: str) -> str:
    return posixpath.splitext(path.lower())[1]


def _reader(path: str) -> Any:
    return READERS[_suffix(path)]


def _is_metadata(path: str) -> bool:
    return posixpath.basename(path).lower().startswith(METADATA)


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """What the format's own survey knows; files that hold no rows of the dataset count none.

    Raises:
        ConfigError: formats are mixed, or images that the dataset has would not reach the model.
    """
    paths = files["path"].to_pylist()
    is_folder = any(map(_is_metadata, paths))
    used = [_is_metadata(path) if is_folder else not posixpath.basename(path).startswith(LEFT_OVER) for path in paths]
    formats = sorted({_suffix(path) for path, own in zip(paths, used, strict=True) if own})
    if len(formats) > 1:
        raise ConfigError(
            f"source.path: the folder holds {' and '.join(formats)} files; name one of the formats by a glob, such as "
            f"*{formats[0]}"
        )
    if needs.with_images and needs.source.columns.image is None and needs.source.columns.video is None and formats:
        first = next(path for path, own in zip(paths, used, strict=True) if own)
        media = [FILE_NAME] if is_folder else media_features(filesystem, access.join(root, first))
        if media:
            raise ConfigError(
                f"source.columns.image: the dataset has {' and '.join(map(repr, media))}, and no column is named for "
                "images or videos, so none would reach the model"
            )
    chosen = pa.array(used)
    if not formats:
        raise ConfigError("source.path: the folder holds no rows of a dataset")
    found: Survey = READERS[formats[0]].survey(filesystem, root, files.filter(chosen), needs)
    order = itertools.count()
    return _spread(found, [next(order) if own else None for own in used])


def _spread(found: Survey, places: list[int | None]) -> Survey:
    """The survey over all files: those without a place among the surveyed ones count no rows."""
    taken = pa.array(places, pa.int64())
    empty = pa.array([], pa.int64())
    groups = {
        name: pa.array(
            [empty if one is None else one for one in getattr(found, name).take(taken).to_pylist()],
            pa.list_(pa.int64()),
        )
        for name in ("row_group_rows", "row_group_bytes", "row_group_lines")
    }
    counts = found.num_samples.take(taken).to_pylist()
    num_samples = [0 if place is None else count for place, count in zip(places, counts, strict=True)]
    return replace(found, num_samples=pa.array(num_samples, pa.int64()), **groups)


def media_features(filesystem: Any, path: str) -> list[str]:
    """The columns that a file's own schema marks as images or videos; none if it cannot be read."""
    try:
        if _suffix(path) == ".arrow":
            with arrow.open_batches(filesystem, path) as (schema, _):
                return features_of(schema)
        if _suffix(path) == ".parquet":
            with access.open_file(filesystem, path) as file:
                return features_of(pq.read_schema(file))
    except Exception:  # the read task reports the error
        return []
    return []


def features_of(schema: pa.Schema) -> list[str]:
    """Names of image and video features, lists of them included, by the metadata that `datasets` leaves."""
    told = (schema.metadata or {}).get(FEATURES_KEY)
    if not told:
        return []
    features = json.loads(told).get("info", {}).get("features", {})
    return [
        name
        for name, feature in features.items()
        if any(kind in json.dumps(feature) for kind in ('"Image"', '"Video"'))
    ]


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """The rows of a piece; names in metadata are relative to its folder.

    Raises:
        Exception: the file is damaged or no longer the one that the manifest lists.
    """
    folder = posixpath.dirname(piece.path) if _is_metadata(piece.path) else ""
    for chunk in _reader(piece.path).read(filesystem, spec, piece):
        if folder:
            for sample in chunk.samples:
                _enter(sample, folder)
        yield chunk


def _enter(sample: Sample, folder: str) -> None:
    """Make the sample's relative names relative to the source root."""

    def inside(uri: str) -> str:
        return uri if scheme_of(uri) or uri.startswith("/") else f"{folder}/{uri}"

    sample.images = [inside(image) if isinstance(image, str) else image for image in sample.images]
    sample.videos = [VideoRef(uri=inside(video.uri)) if video.uri else video for video in sample.videos]


def count(filesystem: Any, spec: ReadSpec, path: str, at_most: int) -> int:
    """As the format's own."""
    return int(_reader(path).count(filesystem, spec, path, at_most))


KIND = Kind("hf", tuple(READERS), survey, read, count)
