"""Reads the source kind `hf`: folders in the layouts of Hugging Face's `datasets`.

    data/train-00000-of-00002.parquet …              files of the hub: images as `struct<bytes, path>`
    data-00000-of-00002.arrow, state.json            files of `save_to_disk`
    train/metadata.csv (.jsonl, .parquet), *.jpg …   image and video folders: one row per metadata row
    train.json                                       arrays or JSON lines, in folders without files of the others

All files with rows have one format, which is read by the module of that format.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.load import ConfigError
from pipeline.formats import arrow, csv, jsonl, parquet
from pipeline.formats.json import KIND as JSON
from pipeline.formats.kind import Chunk, FilePiece, IdRows, Needs, ReadSpec, Selected, SourceKind
from pipeline.formats.uris import scheme_of
from pipeline.storage import access

METADATA = "metadata."
FILE_NAME = "file_name"
FEATURES_KEY = b"huggingface"
FORMATS = {".arrow": arrow.KIND, ".parquet": parquet.KIND, ".jsonl": jsonl.KIND, ".csv": csv.KIND}
OTHER_FORMATS = {".json": JSON}
ALL_FORMATS = FORMATS | OTHER_FORMATS
CACHE_PREFIXES = ("cache-", "tmp")
"""File name prefixes of cache files that `datasets` writes."""
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Names of files of `datasets` that have no rows."""


def _suffix(path: str) -> str:
    return posixpath.splitext(path.lower())[1]


def _is_metadata(path: str) -> bool:
    return posixpath.basename(path).lower().startswith(METADATA)


def select(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Selected:
    """Return the format of the files with rows of the dataset; others, such as images, hold none. ConfigError for no
    rows, mixed formats, or media without a configured column."""
    paths = files["path"].to_pylist()
    is_folder = any(map(_is_metadata, paths))
    names = map(posixpath.basename, paths)
    used = [
        _is_metadata(name) if is_folder else not (name.startswith(CACHE_PREFIXES) or name in DESCRIPTIONS)
        for name in names
    ]
    rows_of = [path for path, is_used in zip(paths, used, strict=True) if is_used]
    formats = sorted(set(map(_suffix, rows_of)))
    if not formats:
        raise ConfigError("source.path: the folder holds no rows of a dataset")
    if len(formats) > 1:
        raise ConfigError(
            f"source.path: the folder holds {' and '.join(formats)} files; name one of the formats by a glob, such as "
            f"*{formats[0]}"
        )
    if needs.with_images and needs.source.columns.image is None and needs.source.columns.video is None:
        media = [FILE_NAME] if is_folder else media_features(filesystem, access.join(root, rows_of[0]))
        if media:
            raise ConfigError(
                f"source.columns.image: the dataset has {' and '.join(map(repr, media))}, and no column is named for "
                "images or videos, so none would reach the model"
            )
    file_format = ALL_FORMATS.get(formats[0])
    if file_format is None:
        raise ConfigError(f"source.path: files {formats[0]!r} are none of {', '.join(ALL_FORMATS)}")
    if file_format.select is not None:
        file_format.select(filesystem, root, files.filter(pa.array(used)), needs)
    return Selected(file_format, used)


def read_ids(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[IdRows]:
    return ALL_FORMATS[_suffix(piece.path)].ids(filesystem, spec, piece)


def media_features(filesystem: Any, path: str) -> list[str]:
    """Return the columns that a file's schema marks as images or videos; empty if the schema cannot be read."""
    try:
        if _suffix(path) == ".arrow":
            with arrow.open_arrow(filesystem, path) as reader:
                schema = reader.schema
        elif _suffix(path) == ".parquet":
            with access.open_file(filesystem, path) as file:
                schema = pq.read_schema(file)
        else:
            return []
        features = json.loads((schema.metadata or {}).get(FEATURES_KEY) or "{}").get("info", {}).get("features", {})
    except Exception:  # the read task reports the error
        return []
    texts = {name: json.dumps(feature) for name, feature in features.items()}
    return [name for name, text in texts.items() if '"Image"' in text or '"Video"' in text]


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """Read the rows of a piece; file names in a metadata file are relative to its folder."""
    folder = posixpath.dirname(piece.path) if _is_metadata(piece.path) else ""

    def below_root(uri: str) -> str:
        return uri if scheme_of(uri) or uri.startswith("/") else f"{folder}/{uri}"

    for chunk in ALL_FORMATS[_suffix(piece.path)].read(filesystem, spec, piece):
        for sample in chunk.samples if folder else ():
            sample.images = [below_root(image) if isinstance(image, str) else image for image in sample.images]
            sample.videos = [replace(ref, uri=below_root(ref.uri)) if ref.uri else ref for ref in sample.videos]
        yield chunk


KIND = SourceKind(
    *("hf", tuple(FORMATS), None, read), select=select, other_suffixes=tuple(OTHER_FORMATS), read_ids=read_ids
)
