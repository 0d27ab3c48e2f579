"""Reads tar archives (plain, gzip, bzip2, xz or zstd) as a stream of runs: consecutive members with the same key. A
plain archive can be indexed by its headers alone, so that reading can begin at any indexed run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import IO, Any

from pipeline.formats.kind import Index, VideoRef, noting_byte
from pipeline.formats.limits import MAX_EXPANSION, MIN_EXPANDED_BYTES, TEXT_MAX_BYTES, max_expanded
from pipeline.formats.media_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from pipeline.formats.tar_archive import Archive
from pipeline.formats.tar_headers import Member
from pipeline.prompts.templates import whole_text
from pipeline.rows.schemas import RowError
from pipeline.storage import access

TEXT_EXTENSIONS = ("txt", "text", "caption", "cap", "transcript", "cls", "id", "json")
TAR_IMAGE_SUFFIXES = (*IMAGE_SUFFIXES, ".img")
"""Suffixes of images; some tools name them `.img`, whatever their format."""
RUN_BYTES = 512
"""Memory of a run besides its data, about; so the number of runs is limited, too."""


@dataclass
class TarSample:
    """Consecutive members with the same key; dictionaries map lower-case extensions to members."""

    key: str
    images: dict[str, bytes] = field(default_factory=dict)
    videos: dict[str, VideoRef] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    num_bytes: int = 0
    error: RowError | None = None
    extensions: set[str] = field(default_factory=set)
    """Of all members, also of those that are not read."""


def natural(extension: str) -> list[tuple[bool, int, str]]:
    """Return the key that sorts extensions by their numbers, `2.png` before `10.png`, and numbers before letters."""
    parts = [part for part in re.split(r"(\d{1,18})", extension) if part]
    return [(False, int(part), "") if part.isdecimal() else (True, 0, part) for part in parts]


def is_companion(extension: str) -> bool:
    """Return whether an image has a name of its own, such as `seg.png`; numbers are no names."""
    stem = extension.rpartition(".")[0]
    return bool(stem) and not re.fullmatch(r"[\d._-]*", stem)


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's name at the first dot of its basename into key (with folder) and lower-case extension; None for
    hidden names and names without an extension, which belong to no sample."""
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and dot and extension else None


@dataclass(frozen=True)
class Selection:
    """Which members are read: texts, and media up to a maximum size (None: no media). `path` is the archive's path in
    the listing; videos in a plain archive become byte ranges of it. `max_bytes` limits the bytes that are read."""

    with_text: bool
    max_image_bytes: int | None = None
    max_video_bytes: int | None = None
    path: str = ""
    max_bytes: int | None = None
    chosen: tuple[str, ...] | None = None
    """Extensions of the images and videos that are read (None: all)."""

    def takes(self, extension: str) -> bool:
        """Return whether a member with this extension is read, if it is an image or a video."""
        is_medium = f".{extension}".endswith((*TAR_IMAGE_SUFFIXES, *VIDEO_SUFFIXES))
        return not is_medium or self.chosen is None or extension in self.chosen

    def check(self, num_bytes: int) -> None:
        """Raise ValueError for more than `max_bytes`."""
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            raise ValueError(f"the data read so far takes more than {self.max_bytes} bytes")


def open_archive(file: IO[bytes], offset: int = 0) -> Archive:
    """Open an archive whose expansion is limited by its size; `offset` is the byte at which a plain one is read."""
    return Archive(file, max_expanded(access.size_of(file), MIN_EXPANDED_BYTES), offset)


def read_runs(file: IO[bytes], selection: Selection, offset: int = 0) -> Iterator[TarSample]:
    """Yield runs in archive order; `offset` is the byte at which reading a plain archive begins. A run that is
    incomplete because of damage is not yielded, because its missing members are unknown. Raises tarfile.TarError,
    OSError, EOFError and the errors of decompressors for an archive that is damaged or cut short, and ValueError if
    more than `selection.max_bytes` would be read."""
    run: TarSample | None = None
    archive = open_archive(file, offset)
    num_bytes = 0
    with closing(archive), noting_byte(lambda: archive.position if archive.is_plain else file.tell()):
        for member in archive:
            parts = None if member.is_folder else split_name(member.name)
            if parts is None:
                continue
            key, extension = parts
            if run is not None and run.key != key:
                num_bytes += RUN_BYTES + run.num_bytes
                selection.check(num_bytes)
                yield run
                run = None
            run = run or TarSample(key)
            try:
                _add(run, archive, member, extension, selection, num_bytes)
            except RowError as error:
                run.error = run.error or error
        if run is not None:
            yield run
        archive.check_end()


def _add(
    run: TarSample, archive: Archive, member: Member, extension: str, selection: Selection, num_bytes: int
) -> None:
    """Add a member to the run; `num_bytes` were read before the run. RowError if the member is unusable."""
    name = access.shown(whole_text(member.name))
    members: dict[str, Any] = run.images
    run.extensions.add(extension)
    if not selection.takes(extension):
        return
    if f".{extension}".endswith(TAR_IMAGE_SUFFIXES):
        max_bytes, code = selection.max_image_bytes, "image_too_large"
    elif f".{extension}".endswith(VIDEO_SUFFIXES):
        members, max_bytes, code = run.videos, selection.max_video_bytes, "video_too_large"
    else:
        is_text = selection.with_text and extension.rpartition(".")[2] in TEXT_EXTENSIONS
        members, max_bytes, code = run.texts, TEXT_MAX_BYTES if is_text else None, "broken_sample"
    if max_bytes is None:
        return
    if member.is_hard_link:
        member = archive.linked(member)
    if not member.is_file:
        raise RowError("broken_sample", f"the member {name!r} is no regular file")
    if extension in members:
        raise RowError("broken_sample", f"the member {name!r} occurs twice")
    if member.size > max_bytes:
        raise RowError(code, f"the member {name!r} has {member.size} bytes, more than {max_bytes}")
    taken = member.end - member.offset
    if member.is_sparse and member.size > MAX_EXPANSION * taken:
        message = f"the sparse member {name!r} takes {taken} bytes and expands to {member.size}"
        raise RowError("broken_sample", f"{message}, more than {MAX_EXPANSION} times as many")
    if members is run.videos and selection.path and archive.is_plain and not member.is_sparse:
        members[extension] = VideoRef(path=selection.path, offset=member.offset_data, size=member.size)
        return
    selection.check(num_bytes + run.num_bytes + member.size)
    try:
        data = archive.content(member)
    except ValueError as error:
        raise RowError("broken_sample", f"the member {name!r} cannot be read: {error}") from None
    run.num_bytes += len(data)
    members[extension] = VideoRef(bytes=data) if members is run.videos else data


def index_runs(file: IO[bytes], max_rows: int, max_bytes: int) -> Index | None:
    """Index the runs of a plain archive in groups at which reading can begin, by its headers. None if it cannot be cut:
    compressed, damaged, with global pax headers, or the members of a key are not consecutive."""
    index = Index()
    keys: set[str] = set()
    key: str | None = None
    group_start = run_start = rows = 0

    def close_before(offset: int) -> None:
        """Close the group before its last run if that run exceeds `max_bytes`, or after it if the group is full."""
        nonlocal group_start, rows
        if rows > 1 and offset - group_start > max_bytes:
            index.add(rows - 1, run_start - group_start, 0)
            group_start, rows = run_start, 1
        if rows and (rows >= max_rows or offset - group_start >= max_bytes):
            index.add(rows, offset - group_start, 0)
            group_start, rows = offset, 0

    end = access.size_of(file)
    try:
        archive = open_archive(file)
        for member in archive if archive.is_plain else ():
            parts = None if member.is_folder else split_name(member.name)
            if parts is None or parts[0] == key:
                continue
            key = parts[0]
            if key in keys:
                return None
            keys.add(key)
            close_before(member.offset)
            run_start = member.offset
            rows += 1
        if not archive.is_plain or archive.has_global_headers:
            return None
    except Exception:  # the read task reports the error
        return None
    close_before(end)
    if rows or not index.rows:
        index.add(rows, end - group_start, 0)
    return index
