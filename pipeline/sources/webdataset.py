"""The source kind `webdataset`: tar shards in which files of one basename, side by side, are one sample.

`a/007.jpg`, `a/007.json`, `a/007.txt` are the sample `a/007`: images and videos are found by suffix and ordered by
extension, the keys of a JSON object and the text members are its fields, and `__key__` is the field that holds the key.
Tars are read as streams and never unpacked, so names are only names. Videos of a tar that is not compressed travel as
places in it. Knows nothing of pixels.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Any

import pyarrow as pa

from pipeline import storage
from pipeline.prompts import whole_text
from pipeline.rows import RowError
from pipeline.sources import images, videos
from pipeline.sources.kind import (
    TEXT_MAX_BYTES,
    Chunk,
    FilePiece,
    Kind,
    Needs,
    ReadSpec,
    Sample,
    Survey,
    VideoRef,
    no_row_groups,
    resolve_id,
)

TEXT_EXTENSIONS = ("txt", "text", "caption", "transcript", "cls", "id")
MAX_HEADER_BYTES = 1024 * 1024
"""The most that a long-name or extended header may hold."""
NUM_PEEKED_SAMPLES = 16
"""How many samples tell which fields a shard has."""


class _Header(tarfile.TarInfo):
    """A member's header; the standard library takes a damaged one for the end of the archive, this one does not."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> _Header:
        try:
            header = super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            tar.saw_end_marker = True  # type: ignore[attr-defined]
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"damaged header at byte {tar.offset}: {error}") from None
        if header.size < 0:
            raise tarfile.ReadError(f"damaged header: {header.name!r} has a negative size")
        return header

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        extended = (*tarfile.GNU_TYPES, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.type in extended and self.type != tarfile.GNUTYPE_SPARSE and not 0 <= self.size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"damaged header: an extended header claims {self.size} bytes")
        return super()._proc_member(tar)  # type: ignore[misc, no-any-return]


@dataclass
class _Group:
    """The members of one sample so far, by extension in lower case."""

    key: str
    images: dict[str, bytes] = field(default_factory=dict)
    videos: dict[str, VideoRef] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    error: RowError | None = None

    def fail(self, code: str, message: str) -> None:
        self.error = self.error or RowError(code, message)


def split_name(name: str) -> tuple[str, str] | None:
    """Key and extension of a member: the folder and basename up to its first dot, and the rest in lower case.

    None for a name that belongs to no sample: no extension, or hidden.
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and dot and extension else None


def _is_image(extension: str) -> bool:
    return ("." + extension).endswith(images.SUFFIXES)


def _is_video(extension: str) -> bool:
    return ("." + extension).endswith(videos.SUFFIXES)


def _is_text(extension: str) -> bool:
    return extension.rpartition(".")[2] in (*TEXT_EXTENSIONS, "json")


@dataclass(frozen=True)
class _Wanted:
    """Which members of an archive are taken: media up to so many bytes, or none, and texts.

    `path` is the archive's own in the listing, so that videos in one that is not compressed can be named instead of
    read.
    """

    with_text: bool
    max_image_bytes: int | None = None
    max_video_bytes: int | None = None
    path: str = ""


def _groups(file: IO[bytes], wanted: _Wanted) -> Iterator[_Group]:
    """Runs of members with one key, in the order of the archive.

    The run that damage cuts short is not yielded: nobody knows which members it lacks.

    Raises:
        tarfile.TarError, OSError, EOFError and what the decompressors raise: the archive is damaged or cut short.
    """
    group: _Group | None = None
    with tarfile.open(fileobj=file, mode="r|*", tarinfo=_Header, errors="surrogateescape") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # a stream's list grows for ever
            parts = None if member.isdir() else split_name(member.name)
            if parts is None:
                continue
            key, extension = parts
            if group is None or group.key != key:
                if group is not None:
                    yield group
                group = _Group(key)
            _add(group, tar, member, extension, wanted)
        if not getattr(tar, "saw_end_marker", False):
            raise tarfile.ReadError("no end-of-archive marker: the file is cut short, or its writer was killed")
        if group is not None:
            yield group
        stream: Any = tar.fileobj
        while rest := stream.read(tarfile.RECORDSIZE):
            if rest.strip(b"\0"):
                raise tarfile.ReadError("data behind the end-of-archive marker: several archives in one file?")


def _add(group: _Group, tar: tarfile.TarFile, member: tarfile.TarInfo, extension: str, wanted: _Wanted) -> None:
    name = storage.shown(whole_text(member.name))
    kept: dict[str, Any] = group.images
    if _is_image(extension):
        kept, max_bytes, code = group.images, wanted.max_image_bytes, "image_too_large"
    elif _is_video(extension):
        kept, max_bytes, code = group.videos, wanted.max_video_bytes, "video_too_large"
    else:
        is_text = wanted.with_text and _is_text(extension)
        kept, max_bytes, code = group.texts, TEXT_MAX_BYTES if is_text else None, "broken_sample"
    if max_bytes is None:
        return
    if not member.isreg():
        group.fail("broken_sample", f"the member {name!r} is no regular file")
    elif extension in kept:
        group.fail("broken_sample", f"the member {name!r} is there twice")
    elif member.size > max_bytes:
        group.fail(code, f"the member {name!r} has {member.size} bytes, more than {max_bytes}")
    elif kept is group.videos and wanted.path and _is_plain(tar) and not member.issparse():
        kept[extension] = VideoRef(path=wanted.path, offset=member.offset_data, size=member.size)
    else:
        content = tar.extractfile(member)
        assert content is not None, member.name
        data: Any = content.read(max_bytes)
        kept[extension] = VideoRef(bytes=data) if kept is group.videos else data


def _is_plain(tar: tarfile.TarFile) -> bool:
    """Whether the archive's own offsets are those of its file."""
    return getattr(tar.fileobj, "comptype", "") == "tar"


def _fields(group: _Group) -> dict[str, Any]:
    """The sample's fields: JSON objects' keys, then text members (which win), then `__key__`.

    Raises:
        RowError: `broken_sample` for text that is no UTF-8, or JSON that is none.
    """
    fields: dict[str, Any] = {}
    for extension, data in sorted(group.texts.items(), key=lambda item: (not item[0].endswith("json"), item[0])):
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
    fields["__key__"] = whole_text(group.key)
    return fields


def _sample(group: _Group, row_index: int, spec: ReadSpec) -> tuple[Sample, dict[str, Any]]:
    """The sample, and all of its fields."""
    sample = Sample(row_index, error=group.error)
    fields: dict[str, Any] = {}
    try:
        if group.error is None and spec.with_images and not (group.images or group.videos):
            raise RowError("missing_image", f"the sample {whole_text(group.key)!r} has no image or video member")
        if spec.needs_text and group.error is None:
            fields = _fields(group)
            sample.fields = {name: fields.get(name) for name in spec.fields}
            if spec.source.id_column is not None:
                own_id = resolve_id(fields.get(spec.source.id_column), spec.source.id_column)
                sample.own_id = whole_text(own_id)
        sample.images = [group.images[extension] for extension in sorted(group.images)]
        sample.videos = [group.videos[extension] for extension in sorted(group.videos)]
    except RowError as error:
        sample.error = error
    return sample, fields


def _kept_text(value: Any) -> str | None:
    if value is None:
        return None
    return whole_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """The samples of a tar in one chunk; `row_index` counts samples by their first member.

    A sample whose members are not side by side is one `broken_sample` row, at its first place.

    Raises:
        Exception: the archive is damaged; the samples before the damage have been yielded.
    """
    samples: list[Sample] = []
    fields: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    failure: Exception | None = None
    try:
        with storage.open_file(filesystem, storage.join(spec.root, piece.path)) as file:
            wanted = _Wanted(spec.needs_text)
            if spec.with_images:
                source = spec.source
                wanted = replace(wanted, max_image_bytes=source.max_image_bytes, path=piece.path)
                wanted = replace(wanted, max_video_bytes=source.video.max_video_bytes)
            for group in _groups(file, wanted):
                if group.key in places:
                    message = f"other samples stand between the members of {whole_text(group.key)!r}"
                    samples[places[group.key]].error = RowError("broken_sample", message)
                    continue
                if piece.stop is not None and len(samples) >= piece.stop:
                    break
                places[group.key] = len(samples)
                sample, own_fields = _sample(group, len(samples), spec)
                samples.append(sample)
                fields.append(own_fields)
    except Exception as error:
        failure = error
    asked = slice(piece.start, piece.stop)
    keep = [pa.array([_kept_text(own.get(name)) for own in fields[asked]], pa.string()) for name in spec.keep.names]
    yield Chunk(samples[asked], keep)
    if failure is not None:
        raise failure


def survey(filesystem: Any, root: str, paths: pa.ChunkedArray, needs: Needs) -> Survey:
    """Counts are unknown; which fields exist is judged by the first samples of the first readable shard.

    Raises:
        ConfigError: a needed field is in none of those samples.
    """
    if needs.columns():
        for path in (one.as_py() for one in paths):
            names = _peek(filesystem, storage.join(root, path))
            if names is not None:
                needs.require(names, f"the first {NUM_PEEKED_SAMPLES} samples of {path}")
                break
    empty = no_row_groups(len(paths))
    keep = pa.schema([(name, pa.string()) for name in needs.keep])
    return Survey(pa.nulls(len(paths), pa.int64()), empty, empty, keep, empty)


def _peek(filesystem: Any, path: str) -> set[str] | None:
    """The fields of the first samples; None when the shard has not one whole sample."""
    names: set[str] | None = None
    try:
        with storage.open_file(filesystem, path) as file:
            for number, group in enumerate(_groups(file, _Wanted(with_text=True))):
                if number >= NUM_PEEKED_SAMPLES:
                    break
                group.error = None
                try:
                    names = (names or set()) | set(_fields(group))
                except RowError:
                    continue
    except Exception:  # what is wrong with the shard is told by its read task
        return names
    return names


def count(filesystem: Any, spec: ReadSpec, path: str, at_most: int) -> int:
    """The samples of a tar by its headers, reading no further than needed; damage counts as the one row it becomes."""
    keys: set[str] = set()
    try:
        with storage.open_file(filesystem, storage.join(spec.root, path)) as file:
            for group in _groups(file, _Wanted(with_text=False)):
                keys.add(group.key)
                if len(keys) >= at_most:
                    break
    except Exception:
        return min(at_most, len(keys) + 1)
    return len(keys)


KIND = Kind("webdataset", (".tar", ".tar.gz", ".tgz"), survey, read, count)
