"""Reads the source kind `webdataset`: tar shards in which consecutive members with the same key are one sample.

`a/007.jpg`, `a/007.json`, `a/007.txt` are the sample `a/007`. Images and videos are recognised by suffix and sorted by
extension; the keys of JSON objects and the text members are fields, and `__key__` is the key.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import pyarrow as pa

from configs.load import ConfigError
from configs.source import SourceConfig
from pipeline.formats.kind import (
    Chunk,
    FilePiece,
    Index,
    Needs,
    ReadSpec,
    Sample,
    SourceKind,
    Survey,
    count_of,
    max_bytes_of,
    resolve_id,
    survey_of,
)
from pipeline.formats.limits import MAX_SPAN_EXPANSION, MIN_SPAN_BYTES
from pipeline.formats.nested import found_in, lookup
from pipeline.formats.records import json_of, kept_arrays, text_of
from pipeline.formats.tars import Selection, TarSample, index_runs, is_companion, natural, read_runs
from pipeline.prompts.templates import whole_text
from pipeline.rows.schemas import RowError
from pipeline.storage import access

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.zstd", ".tzst")
NUM_PEEKED_SAMPLES = 16
"""Number of samples that are read to determine the fields of a shard."""
NUM_INDEX_THREADS = 8
REMOTE_INDEX_FACTOR = 16
"""A remote tar is indexed if it is larger than this many spans: skipping data costs about as much as reading it."""


def select(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> None:
    """Raise ConfigError if the first samples of the first readable shard lack a needed field."""
    if not needs.columns():
        return
    for path in map(str, files["path"]):
        names = _peek(filesystem, access.join(root, path), needs.columns())
        if names is not None:
            where = f"the first {NUM_PEEKED_SAMPLES} samples of {path}"
            _require_members(needs, names[1], where)
            needs.require(names[0] | {text for _, text in needs.source.columns if text is not None}, where)
            return


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """Index large plain tars by their headers."""
    paths = files["path"].to_pylist()
    source = needs.source
    min_bytes = source.span_max_bytes * (1 if access.is_local(filesystem) else REMOTE_INDEX_FACTOR)

    def index(path: str, size_bytes: int) -> Index | None:
        if size_bytes <= min_bytes:
            return None
        try:
            with access.open_file(filesystem, access.join(root, path)) as file:
                return index_runs(file, source.span_max_rows, source.span_max_bytes)
        except Exception:  # the read task reports the error
            return None

    with ThreadPoolExecutor(NUM_INDEX_THREADS) as pool:
        indices = list(pool.map(index, paths, files["size_bytes"].to_pylist()))
    return survey_of(indices)


def _peek(filesystem: Any, path: str, needed: Collection[str]) -> tuple[set[str], set[str]] | None:
    """Return the fields of the first samples, with those of the needed ones that are inside of them, and the extensions
    of their members; None if the shard has no sample with readable fields."""
    names: set[str] = set()
    extensions: set[str] = set()
    with suppress(Exception), access.open_file(filesystem, path) as file:  # the read task reports the error
        selection = Selection(with_text=True, max_bytes=MAX_SPAN_EXPANSION * MIN_SPAN_BYTES)
        for run in islice(read_runs(file, selection), NUM_PEEKED_SAMPLES):
            with suppress(RowError):
                names |= found_in(_fields(run), needed)
                extensions |= run.extensions
    return (names, extensions) if names else None


def _require_members(needs: Needs, extensions: set[str], where: str) -> None:
    """Raise ConfigError for a column of images or videos that is the extension of no member."""
    for what, text in needs.source.columns:
        if text is not None and not {part.strip().lstrip(".").lower() for part in text.split(";")} & extensions:
            there = ", ".join(sorted(extensions))
            raise ConfigError(f"source.columns.{what}: no member {text!r} is in {where}; extensions there: {there}")


def count(filesystem: Any, spec: ReadSpec, path: str, at_most: int) -> int:
    """Count the samples of a tar by its headers, up to `at_most`."""
    known_keys: set[str] = set()

    def keys() -> Iterator[str]:
        with access.open_file(filesystem, access.join(spec.root, path)) as file:
            for run in read_runs(file, Selection(with_text=False)):
                if run.key not in known_keys:
                    known_keys.add(run.key)
                    yield run.key

    return count_of(keys(), at_most)


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """Read the samples of a piece of a tar in one chunk; `row_index` counts samples in the order of their first member.
    A sample whose members are not consecutive is one `broken_sample` row, at the index of its first member."""
    samples: list[Sample] = []
    kept_rows: list[dict[str, str | None]] = []
    offsets: dict[str, int] = {}
    first = piece.entry.row
    failure: Exception | None = None
    selection, source = Selection(spec.needs_text), spec.source
    if spec.with_images:
        limits = source.max_image_bytes, source.video.max_video_bytes
        selection = Selection(spec.needs_text, *limits, piece.path, chosen=chosen_members(source))
    selection = replace(selection, max_bytes=max_bytes_of(spec, [piece.size_bytes]))
    try:
        with access.open_file(filesystem, access.join(spec.root, piece.path)) as file:
            for run in read_runs(file, selection, piece.entry.offset):
                if run.key in offsets:
                    message = f"the members of {whole_text(run.key)!r} are not consecutive"
                    samples[offsets[run.key]].error = RowError("broken_sample", message)
                    continue
                row_index = first + len(samples)
                if piece.stop is not None and row_index >= piece.stop:
                    break
                offsets[run.key] = len(samples)
                sample, sample_kept = _sample(run, row_index, spec)
                samples.append(sample)
                kept_rows.append(sample_kept)
        piece.check_end(first + len(samples), "archive")
    except Exception as error:
        failure = error
    piece_rows = slice(piece.start - first, None)
    yield Chunk(samples[piece_rows], kept_arrays(spec, kept_rows[piece_rows]))
    if failure is not None:
        raise failure


def _sample(run: TarSample, row_index: int, spec: ReadSpec) -> tuple[Sample, dict[str, str | None]]:
    """Convert a run to a sample; return it with its kept columns. Parsed JSON may take 30 times its text, so none of it
    is kept."""
    sample, kept_values = Sample(row_index), dict[str, str | None]()
    try:
        if run.error is not None:
            raise run.error
        if spec.with_images and not (run.images or run.videos):
            raise RowError("missing_image", f"the sample {whole_text(run.key)!r} has no image or video member")
        if spec.needs_text:
            fields = _fields(run)
            sample.fields = json_of({name: lookup(fields, name) for name in spec.fields})
            kept_values = {name: text_of(lookup(fields, name)) for name in spec.keep.names}
            if spec.source.id_column is not None:
                id_column = spec.source.id_column
                sample.id_value = whole_text(resolve_id(lookup(fields, id_column), id_column, spec.source))
        sample.images = [run.images[extension] for extension in _shown(spec.source, run.images)]
        sample.videos = [run.videos[extension] for extension in sorted(run.videos, key=natural)]
    except RowError as error:
        sample.error = error
    return sample, kept_values


def chosen_members(source: SourceConfig) -> tuple[str, ...] | None:
    """Return the extensions that `source.columns` names, such as `jpg;png`; None if it names none."""
    named = [text for text in (source.columns.image, source.columns.video) if text is not None]
    return tuple(part.strip().lstrip(".").lower() for text in named for part in text.split(";")) if named else None


def _shown(source: SourceConfig, images: Mapping[str, bytes]) -> list[str]:
    """Return the extensions of a sample's images in the order of their numbers; without companions, such as masks,
    beside an image that has no name of its own, unless `source.columns` or `source.companions` shows them."""
    extensions = sorted(images, key=natural)
    if source.columns.image is None and source.companions == "skip":
        return [one for one in extensions if not is_companion(one)] or extensions
    return extensions


def _fields(run: TarSample) -> dict[str, Any]:
    """Return a sample's fields: keys of JSON objects, overridden by text members, then by `__key__`; RowError
    `broken_sample` for text that is not UTF-8 and for damaged JSON."""
    fields: dict[str, Any] = {}
    for extension, data in sorted(run.texts.items(), key=lambda item: (not item[0].endswith("json"), item[0])):
        stem, _, kind = extension.rpartition(".")
        try:
            text = data.decode("utf-8-sig")
            value = json.loads(text) if kind == "json" else text
        except (ValueError, RecursionError) as error:
            raise RowError("broken_sample", f"the member .{extension} is not readable: {error}") from None
        if isinstance(value, dict):
            fields.update(value)
        else:
            fields[stem or kind] = value
    fields["__key__"] = whole_text(run.key)
    return fields


KIND = SourceKind("webdataset", SUFFIXES, survey, read, has_cheap_ids=False, select=select, count_early=count)
