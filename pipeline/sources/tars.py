"""Reads tar archives (plain, gzip, bzip2, xz or zstd) as a stream of runs: consecutive members with the same key. A
plain archive can be indexed by its headers alone, so that reading can begin at any indexed run."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import pyarrow as pa

from pipeline.prompts.templates import whole_text
from pipeline.rows.schemas import RowError
from pipeline.sources.kind import TEXT_MAX_BYTES, Index, VideoRef, noting_byte
from pipeline.sources.lines import MAX_EXPANSION
from pipeline.sources.media_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from pipeline.storage import access

TEXT_EXTENSIONS = ("txt", "text", "caption", "transcript", "cls", "id", "json")
MAX_HEADER_BYTES = 1024 * 1024
"""Maximum size of a long-name or extended header."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
MIN_EXPANDED_BYTES = 64 * 1024 * 1024


class Header(tarfile.TarInfo):
    """A member's header; raises ReadError if it is damaged, where the standard library ends the archive."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Header:
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
class Run:
    """Consecutive members with the same key; dictionaries map lower-case extensions to members."""

    key: str
    images: dict[str, bytes] = field(default_factory=dict)
    videos: dict[str, VideoRef] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    num_bytes: int = 0
    error: RowError | None = None


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's name at the first dot of its basename into key (with folder) and lower-case extension; None for
    hidden names and names without an extension, which belong to no sample."""
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and dot and extension else None


@dataclass(frozen=True)
class Selection:
    """Which members are read: texts, and media up to a maximum size (None: no media). `path` is the archive's path in
    the listing; videos in a plain archive become byte ranges of it."""

    with_text: bool
    max_image_bytes: int | None = None
    max_video_bytes: int | None = None
    path: str = ""


def read_runs(file: IO[bytes], selection: Selection, offset: int = 0) -> Iterator[Run]:
    """Yield runs in archive order; `offset` is the byte at which reading a plain archive begins. A run that is
    incomplete because of damage is not yielded, because its missing members are unknown. Raises tarfile.TarError,
    OSError, EOFError and the errors of decompressors for an archive that is damaged or cut short."""
    size = access.size_of(file)
    file.seek(offset)
    stream: Any = file
    if not offset and file.read(len(ZSTD_MAGIC)) == ZSTD_MAGIC:
        file.seek(0)
        stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
    file.seek(offset)
    mode = "r|" if offset or stream is not file else "r|*"
    run: Run | None = None
    is_plain = False
    with (
        tarfile.open(fileobj=stream, mode=mode, tarinfo=Header, errors="surrogateescape") as tar,  # type: ignore[call-overload]
        noting_byte(lambda: offset + tar.offset if is_plain else file.tell()),
    ):
        is_plain = stream is file and getattr(tar.fileobj, "comptype", "") == "tar"
        max_bytes = None if is_plain else max(MIN_EXPANDED_BYTES, MAX_EXPANSION * size)
        for member in tar:
            tar.members = []  # a stream's list grows without bound
            if max_bytes is not None and member.offset_data + member.size > max_bytes:
                raise tarfile.ReadError(f"the archive expands to more than {MAX_EXPANSION} times its size")
            parts = None if member.isdir() else split_name(member.name)
            if parts is None:
                continue
            key, extension = parts
            if run is not None and run.key != key:
                yield run
                run = None
            run = run or Run(key)
            try:
                _add(run, tar, member, extension, selection, offset if is_plain else None)
            except RowError as error:
                run.error = run.error or error
        if not getattr(tar, "saw_end_marker", False):
            raise tarfile.ReadError("no end-of-archive marker: the file is cut short, or its writer was killed")
        if run is not None:
            yield run
        while rest := tar.fileobj.read(tarfile.RECORDSIZE):
            if rest.strip(b"\0"):
                raise tarfile.ReadError("data behind the end-of-archive marker: several archives in one file?")


def _add(
    run: Run, tar: tarfile.TarFile, member: tarfile.TarInfo, extension: str, selection: Selection, offset: int | None
) -> None:
    """Add a member to the run; `offset` is where reading began (None: compressed). RowError if it is unusable."""
    name = access.shown(whole_text(member.name))
    members: dict[str, Any] = run.images
    if f".{extension}".endswith(IMAGE_SUFFIXES):
        max_bytes, code = selection.max_image_bytes, "image_too_large"
    elif f".{extension}".endswith(VIDEO_SUFFIXES):
        members, max_bytes, code = run.videos, selection.max_video_bytes, "video_too_large"
    else:
        is_text = selection.with_text and extension.rpartition(".")[2] in TEXT_EXTENSIONS
        members, max_bytes, code = run.texts, TEXT_MAX_BYTES if is_text else None, "broken_sample"
    if max_bytes is None:
        return
    if not member.isreg():
        raise RowError("broken_sample", f"the member {name!r} is no regular file")
    if extension in members:
        raise RowError("broken_sample", f"the member {name!r} occurs twice")
    if member.size > max_bytes:
        raise RowError(code, f"the member {name!r} has {member.size} bytes, more than {max_bytes}")
    if members is run.videos and selection.path and offset is not None and not member.issparse():
        members[extension] = VideoRef(path=selection.path, offset=offset + member.offset_data, size=member.size)
        return
    content = tar.extractfile(member)
    assert content is not None, member.name
    data = content.read(max_bytes)
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

    try:
        with tarfile.open(fileobj=file, mode="r:", tarinfo=Header, errors="surrogateescape") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]
                parts = None if member.isdir() else split_name(member.name)
                if parts is None or parts[0] == key:
                    continue
                key = parts[0]
                if key in keys:
                    return None
                keys.add(key)
                close_before(member.offset)
                run_start = member.offset
                rows += 1
            if not getattr(tar, "saw_end_marker", False) or tar.pax_headers:
                return None
    except Exception:  # the read task reports the error
        return None
    end = access.size_of(file)
    close_before(end)
    if rows or not index.rows:
        index.add(rows, end - group_start, 0)
    return index
