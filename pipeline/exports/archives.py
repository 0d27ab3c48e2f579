"""Copies a tar archive with one more member in each chosen sample; all other bytes of copied members are unchanged.

Members are copied as the blocks that they are in the source, extended headers included. The archive is read as
`pipeline.formats.webdataset` reads it: a sample is a run of members with one key, and its index is that of its first
member. Members that belong to no sample are copied; samples without a caption are left out.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import tarfile
import tempfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import pyarrow as pa

from pipeline.formats.limits import MAX_EXPANSION, max_expanded
from pipeline.formats.tar_archive import Archive, Compression, compression_of, decompressed
from pipeline.formats.tar_headers import Member
from pipeline.formats.tars import split_name
from pipeline.storage import access

COPY_BYTES = 8 * 1024**2
EXPAND_BYTES = 64 * 1024
CUT_SHORT = (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowException, gzip.BadGzipFile)
"""Errors of archives that are damaged or cut short; decompressors also raise OSError without a number."""


@dataclass
class Copied:
    """Indices of samples whose caption was added, and of samples that had a member of this name and keep it."""

    written: set[int] = field(default_factory=set)
    existing: set[int] = field(default_factory=set)
    outside: set[int] = field(default_factory=set)
    """Samples that are left out, because the name of a member leaves the archive's root."""


def copy_with(
    source: BinaryIO, sink: BinaryIO, captions: Mapping[int, bytes], extension: str, overwrite: bool
) -> Copied:
    """Copy an archive to `sink`, compressed as it is, with the caption of each sample index as the sample's last member
    `<key>.<extension>`. Samples that are not in `captions` are left out.

    An archive that is cut short is copied up to its last complete member.

    Raises:
        ValueError: the archive expands to more than the limit for sources.
        OSError: reading or writing failed.
    """
    compression = compression_of(source)
    with _plain(source, compression) as plain, _compressed(sink, compression) as target:
        return _Copier(plain, target, captions, extension, overwrite).copy()


@contextlib.contextmanager
def _plain(file: BinaryIO, compression: Compression) -> Iterator[BinaryIO]:
    """Provide the archive as a plain file: a temporary copy if it is compressed, up to where it is damaged."""
    if not compression:
        yield file
        return
    max_bytes = max_expanded(access.size_of(file))
    with tempfile.TemporaryFile(prefix="draftfleet-") as copy:
        with _until_damage(), decompressed(file, compression) as stream:
            read = getattr(stream, "read1", stream.read)  # `read` loses what it has read before damage
            while block := read(EXPAND_BYTES):
                copy.write(block)
                if copy.tell() > max_bytes:
                    raise ValueError(f"the archive expands to more than {MAX_EXPANSION} times its size")
        copy.seek(0)
        yield copy


@contextlib.contextmanager
def _until_damage() -> Iterator[None]:
    """Suppress the errors of a damaged archive, and raise those of reading and writing files."""
    try:
        yield
    except CUT_SHORT:
        pass
    except OSError as error:
        if type(error) is not OSError or error.errno is not None:
            raise


@contextlib.contextmanager
def _compressed(file: BinaryIO, compression: Compression) -> Iterator[Any]:
    """Provide a file that compresses into `file` and leaves it open; equal content gives equal bytes."""
    if not compression:
        yield file
    elif compression == "gzip":
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as stream:
            yield stream
    elif compression == "zstd":
        buffer = pa.PythonFile(_Unclosed(file), mode="w")
        with pa.CompressedOutputStream(buffer, "zstd") as stream:
            yield stream
    else:
        with {"bz2": bz2.BZ2File, "xz": lzma.LZMAFile}[compression](file, "wb") as stream:
            yield stream


class _Unclosed(io.RawIOBase):
    """Writes to a file and does not close it; Arrow closes what it writes to."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)


class _Copier:
    def __init__(
        self, plain: BinaryIO, target: Any, captions: Mapping[int, bytes], extension: str, overwrite: bool
    ) -> None:
        self._plain, self._target, self._captions = plain, target, captions
        self._extension, self._overwrite = extension, overwrite
        self._copied = Copied()
        self._indices: dict[str, int] = {}
        self._key: str | None = None
        self._num_bytes = 0
        self._has_member = False
        self._mtime = 0

    def copy(self) -> Copied:
        outside = self._find_outside()
        end = 0
        for member in _members(self._plain):
            parts = None if member.is_folder else split_name(member.name)
            key = parts[0] if parts else None
            if key is not None and key != self._key:
                self._end_sample()
                self._begin_sample(key, member)
            # Global headers before a member belong to all later ones.
            self._copy_blocks(end, member.offset)
            if self._keeps(parts, outside):
                self._copy_blocks(member.offset, member.end)
            end = member.end
        self._end_sample()
        self._write(b"\0" * (2 * tarfile.BLOCKSIZE))
        self._write(b"\0" * (-self._num_bytes % tarfile.RECORDSIZE))
        return self._copied

    def _find_outside(self) -> Collection[str]:
        """Return the keys with `..` or an absolute path."""
        keys = set()
        for member in _members(self._plain):
            if member.name.startswith("/") or ".." in member.name.split("/"):
                keys.add((split_name(member.name) or (member.name, ""))[0])
        return keys

    def _begin_sample(self, key: str, member: Member) -> None:
        self._indices.setdefault(key, len(self._indices))
        self._key, self._has_member, self._mtime = key, False, member.mtime

    def _keeps(self, parts: tuple[str, str] | None, outside: Collection[str]) -> bool:
        """Return whether the member that was read last is copied."""
        if parts is None:
            return True
        key, extension = parts
        index = self._indices[key]
        if index not in self._captions:
            return False
        if key in outside:
            self._copied.outside.add(index)
            return False
        if extension != self._extension:
            return True
        self._has_member = self._has_member or not self._overwrite
        return not self._overwrite

    def _end_sample(self) -> None:
        """Write the caption of the sample whose members were copied last."""
        if self._key is None:
            return
        index = self._indices[self._key]
        if index not in self._captions or index in self._copied.outside:
            return
        if self._has_member:
            self._copied.existing.add(index)
            return
        if index in self._copied.written:  # its members are not side by side; such samples are error rows
            return
        data = self._captions[index]
        header = tarfile.TarInfo(f"{self._key}.{self._extension}")
        header.size, header.mtime, header.mode = len(data), self._mtime, 0o644
        self._write(header.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
        self._write(data + b"\0" * (-len(data) % tarfile.BLOCKSIZE))
        self._copied.written.add(index)

    def _copy_blocks(self, start: int, stop: int) -> None:
        """Copy bytes of the source; leaves the position of the source as it was."""
        position = self._plain.tell()
        self._plain.seek(start)
        while start < stop:
            block = self._plain.read(min(COPY_BYTES, stop - start))
            if not block:
                raise OSError("the archive became shorter while it was copied")
            self._write(block)
            start += len(block)
        self._plain.seek(position)

    def _write(self, data: bytes) -> None:
        self._target.write(data)
        self._num_bytes += len(data)


def _members(plain: BinaryIO) -> Iterator[Member]:
    """Yield each complete member; ends where the archive is cut short."""
    size = access.size_of(plain)
    with contextlib.suppress(*CUT_SHORT):
        for member in Archive(plain, size):
            if member.end > size:
                return
            yield member
