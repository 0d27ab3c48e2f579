"""Reads the members of a tar archive, plain or compressed, as a stream. Every claim of a header is checked against the
archive's size before anything is skipped, read or decompressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any, Literal

import pyarrow as pa

from pipeline.formats.limits import MAX_EXPANSION, MAX_HEADER_BYTES
from pipeline.formats.tar_headers import (
    BAD_MAP,
    BLOCK,
    EXTENDED,
    LONG_NAMES,
    SPARSE,
    Extended,
    Member,
    kind_and_size,
    member_of,
    number,
    padded,
    records_of,
    segments_of,
    text_of,
    with_segments,
)
from pipeline.storage import access

MAX_LINKED = 1_000_000
"""Maximum number of members that hard links can refer to."""
MAX_COPIED_BYTES = 8 * 1024**3
"""A compressed archive with hard links is decompressed to a temporary file, which has at most this many bytes."""
SKIP_BYTES = 1024 * 1024
BUFFER_BYTES = 64 * 1024
Compression = Literal["", "gzip", "bz2", "xz", "zstd"]


def compression_of(file: IO[bytes]) -> Compression:
    """Return the compression of an archive from its first bytes; the file's position is then 0."""
    file.seek(0)
    start = file.read(10)
    file.seek(0)
    if start.startswith(b"\x1f\x8b\x08"):
        return "gzip"
    if start.startswith(b"BZh") and start[4:] == b"1AY&SY":
        return "bz2"
    if start.startswith((b"\xfd7zXZ\0", b"\x5d\0\0\x80")):
        return "xz"
    return "zstd" if start.startswith(b"\x28\xb5\x2f\xfd") else ""


def decompressed(file: IO[bytes], compression: Compression) -> Any:
    """Return the decompressed content as a readable stream, which must be closed before the file."""
    if compression == "zstd":
        return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
    opener: Any = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}[compression]
    return opener(file, "rb")


class _Buffered(io.BufferedReader):
    """Buffers a file that its opener closes; the base class closes it with the buffer."""

    def close(self) -> None:
        pass


class _Copy:
    """A temporary file with the content of a stream up to `max_bytes`, or up to where the stream is damaged; reading
    further raises that error."""

    def __init__(self, stream: Any, max_bytes: int) -> None:
        self._file = tempfile.TemporaryFile(prefix="draftfleet-")  # noqa: SIM115
        self._damage: Exception | None = None
        read = getattr(stream, "read1", stream.read)  # `read` loses what it has read before damage
        try:
            while self._file.tell() <= max_bytes and (block := read(BUFFER_BYTES)):
                self._file.write(block)
        except OSError as error:
            if error.errno is not None:
                self._file.close()
                raise
            self._damage = error
        except Exception as error:  # decompressors raise errors of no common class
            self._damage = error
        self.is_whole = self._file.tell() <= max_bytes
        self.close = self._file.close

    def seek(self, position: int) -> None:
        self._file.seek(position)

    def read(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if num_bytes and not data and self._damage is not None:
            raise self._damage
        return data


def _plain_name(name: str) -> str:
    return name.removeprefix("./")


class Archive:
    """Iterates over the members of an archive from byte `offset` on; a compressed one may expand to `max_bytes`.

    The iterator, `content` and `check_end` raise tarfile.ReadError, OSError, EOFError and the errors of decompressors
    for an archive that is damaged or cut short; a damaged member raises only after it was yielded."""

    def __init__(self, file: IO[bytes], max_bytes: int, offset: int = 0) -> None:
        size = access.size_of(file)
        compression = "" if offset else compression_of(file)
        self.is_plain = not compression
        self.has_global_headers = False
        self._files: dict[str, Member] | None = None
        """The regular members before the last hard link, by name, if there is a hard link."""
        self._files_end = 0
        self._file, self._compression, self._can_seek = file, compression, self.is_plain
        self._copy: _Copy | None = None
        self._position, self._max_bytes = offset, size if self.is_plain else max_bytes
        self._stream: Any = decompressed(file, compression) if compression else file
        if self.is_plain:
            if isinstance(file, io.RawIOBase):
                self._stream = _Buffered(file, BUFFER_BYTES)  # headers are small
            self._stream.seek(offset)

    @property
    def position(self) -> int:
        return self._position

    def __iter__(self) -> Iterator[Member]:
        while (member := self._next_member()) is not None:
            yield member
            self._skip_to(member.end)

    def content(self, member: Member) -> bytes:
        """Return the content of the member that was yielded last, once; ValueError for an invalid map of a sparse one.
        The caller checks `member.size`."""
        self._skip_to(member.offset_data)
        if not member.is_sparse:
            return self._read_all(member.stored)
        if member.error:
            raise ValueError(member.error)
        segments = self._read_map(member) if member.segments is None else member.segments
        content = bytearray(member.size)
        end = 0
        for offset, size in segments:
            stop = offset + size
            if not end <= offset <= stop <= member.size or self._position + size > member.offset_data + member.stored:
                raise ValueError(BAD_MAP)
            content[offset:stop] = self._read_all(size)
            end = stop
        return bytes(content)

    def linked(self, member: Member) -> Member:
        """Return the regular member before a hard link that the link is another name of, or the link itself if there is
        none, or a compressed archive is too large for a temporary file (`MAX_COPIED_BYTES`)."""
        if not self._can_seek and not self._copied():
            return member
        if self._files is None:
            self._files, self._files_end = {}, 0
        self._skip_to(self._files_end)
        while self._position < member.offset and (earlier := self._next_member()) is not None:
            if earlier.is_file and len(self._files) < MAX_LINKED:
                self._files[_plain_name(earlier.name)] = earlier
            self._files_end = earlier.end
            self._skip_to(earlier.end)
        return self._files.get(_plain_name(member.link), member)

    def _copied(self) -> bool:
        """Read a compressed archive from a temporary file from now on; return False if it is too large for that."""
        if self._copy is None:
            position = self._file.tell()
            self._file.seek(0)
            # Closing this stream would close the file.
            self._second = decompressed(self._file, self._compression)
            self._copy = _Copy(self._second, min(MAX_COPIED_BYTES, self._max_bytes))
            if self._copy.is_whole:
                self._stream, self._can_seek = self._copy, True
            else:
                self._file.seek(position)
        return self._can_seek

    def close(self) -> None:
        """Remove the temporary file."""
        if self._copy is not None:
            self._copy.close()

    def check_end(self) -> None:
        """Raise ReadError if anything but zeros is behind the last member."""
        while rest := self._read(SKIP_BYTES):
            if rest.strip(b"\0"):
                raise tarfile.ReadError("data behind the end-of-archive marker: several archives in one file?")

    def _read(self, num_bytes: int) -> bytes:
        """Read `num_bytes`, or fewer at the end of the archive."""
        parts = []
        while num_bytes and (part := self._stream.read(num_bytes)):
            parts.append(part)
            num_bytes -= len(part)
            self._position += len(part)
        if self._position > self._max_bytes:
            self._check_claim(self._position)
        return b"".join(parts) if len(parts) != 1 else bytes(parts[0])

    def _read_all(self, num_bytes: int) -> bytes:
        self._check_claim(self._position + num_bytes)
        data = self._read(num_bytes)
        if len(data) < num_bytes:
            raise tarfile.ReadError("unexpected end of data")
        return data

    def _check_claim(self, position: int) -> None:
        """Raise ReadError if the archive cannot have this many bytes."""
        if position <= self._max_bytes:
            return
        if not self.is_plain:
            raise tarfile.ReadError(f"the archive expands to more than {MAX_EXPANSION} times its size")
        raise tarfile.ReadError(f"a header claims {position - self._position} bytes, beyond the end of the archive")

    def _skip_to(self, position: int) -> None:
        self._check_claim(position)
        if self._can_seek:
            self._stream.seek(position)
            self._position = position
        while self._position < position:
            if not self._read(min(SKIP_BYTES, position - self._position)):
                raise tarfile.ReadError("unexpected end of data")

    def _next_member(self) -> Member | None:
        """Read the headers of the next member; None at the end-of-archive marker."""
        extended: Extended | None = None
        while True:
            start = self._position
            block = self._read(BLOCK)
            if not block:
                raise tarfile.ReadError("no end-of-archive marker: the file is cut short, or its writer was killed")
            if len(block) == BLOCK and not block.strip(b"\0"):
                if extended is not None:
                    raise tarfile.ReadError(f"damaged header at byte {start}: no member follows an extended header")
                return None
            extended = extended or Extended(start)
            kind, size = kind_and_size(block, start)
            if kind not in EXTENDED:
                return self._member(block, extended)
            extended.take(size)
            data = self._read_all(padded(size))[:size]
            if kind in LONG_NAMES:
                if kind == tarfile.GNUTYPE_LONGNAME:
                    extended.name = text_of(data)
                else:
                    extended.link = text_of(data)
                continue
            records = list(records_of(data))
            if kind != tarfile.XGLTYPE:
                extended.add_records(records)
                continue
            self.has_global_headers = True
            if any(keyword in ("path", "size") or keyword.startswith(SPARSE) for keyword, _ in records):
                raise tarfile.ReadError("damaged header: a global header sets the name or size of all members")
            if extended.offset == start:
                extended = None

    def _member(self, block: bytes, extended: Extended) -> Member:
        member = member_of(block, self._position, extended)
        if not member.is_sparse:
            return member
        fields = [block[386:482]]
        is_continued = member.type == tarfile.GNUTYPE_SPARSE and block[482]
        while is_continued:
            extended.take(0)
            more = self._read_all(BLOCK)
            fields.append(more[:504])
            is_continued = more[504]
        return with_segments(replace(member, offset_data=self._position), block, b"".join(fields), extended)

    def _read_map(self, member: Member) -> tuple[tuple[int, int], ...]:
        """Read the map at the beginning of a sparse member in format 1.0: lines with a count, offsets and sizes."""
        blocks: list[bytes] = []
        num_lines, num_expected = 0, 1
        while num_lines < num_expected:
            if BLOCK * len(blocks) >= min(MAX_HEADER_BYTES, member.stored):
                raise ValueError(BAD_MAP)
            blocks.append(self._read_all(BLOCK))
            num_lines += blocks[-1].count(b"\n")
            if num_lines and num_expected == 1:
                num_expected += 2 * number(b"".join(blocks).partition(b"\n")[0])
        values = list(map(number, b"".join(blocks).split(b"\n")[1:num_expected]))
        return segments_of(values)
