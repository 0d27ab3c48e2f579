"""Parses headers of tar members: formats ustar, GNU and pax, with sparse members. `tarfile` bounds neither their number
and size nor the time to parse them."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pipeline.formats.limits import MAX_HEADER_BYTES

BLOCK = tarfile.BLOCKSIZE
LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
EXTENDED = (*LONG_NAMES, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)
"""Types of headers that belong to the next member, or to all members."""
SPARSE = "GNU.sparse."
BAD_MAP = "the map of a sparse member is damaged"
_WITHOUT_DATA = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
_MAX_DIGITS = 20


@dataclass(frozen=True)
class Member:
    """One member: `size` bytes of content, which take `stored` bytes from `offset_data` on. Its headers begin at
    `offset`. The content of a sparse member consists of `segments` (offset and size); if they are None, they are in a
    map at the beginning of its stored bytes. A member with an `error` has no content that can be read."""

    name: str
    type: bytes
    size: int
    stored: int
    offset: int
    offset_data: int
    mtime: int = 0
    is_sparse: bool = False
    segments: tuple[tuple[int, int], ...] | None = None
    error: str = ""
    link: str = ""
    """The name of the member that a hard link is another name of."""

    @property
    def end(self) -> int:
        return self.offset_data + padded(self.stored)

    @property
    def is_file(self) -> bool:
        return self.type in tarfile.REGULAR_TYPES

    @property
    def is_hard_link(self) -> bool:
        return self.type == tarfile.LNKTYPE

    @property
    def is_folder(self) -> bool:
        return self.type == tarfile.DIRTYPE


@dataclass
class Extended:
    """The extended headers before a member: the first one's position, and the bytes that further headers may take."""

    offset: int
    num_left: int = MAX_HEADER_BYTES
    name: str | None = None
    link: str | None = None
    pax: dict[str, bytes] = field(default_factory=dict)
    values: list[bytes] = field(default_factory=list)
    """Offsets and sizes of segments, in turns, of GNU's sparse formats 0.0 and 0.1."""

    def take(self, num_bytes: int) -> None:
        """Count a header's block and the `num_bytes` behind it; ReadError if they are too many."""
        self.num_left -= BLOCK + num_bytes
        if self.num_left < 0:
            message = f"the extended headers of a member have more than {MAX_HEADER_BYTES} bytes"
            raise tarfile.ReadError(f"damaged header: {message}; the last one claims {num_bytes} bytes")

    def add_records(self, records: list[tuple[str, bytes]]) -> None:
        """Add the records of a pax header."""
        self.pax.update(records)
        maps = [value.split(b",") for keyword, value in records if keyword == "GNU.sparse.map"]
        pairs = [value for keyword, value in records if keyword in ("GNU.sparse.offset", "GNU.sparse.numbytes")]
        self.values += maps[-1] if maps else pairs


def member_of(block: bytes, position: int, extended: Extended) -> Member:
    """Return a member from its own header, which ends at `position`, and the extended headers before it; ReadError if
    its end is unknown. Of a sparse member, `with_segments` adds the content's size."""
    kind, size = kind_and_size(block, position - BLOCK)
    name, prefix, pax = text_of(block[:100]), text_of(block[345:500]), extended.pax
    kind = tarfile.DIRTYPE if kind == tarfile.AREGTYPE and name.endswith("/") else kind
    if prefix and kind != tarfile.GNUTYPE_SPARSE:
        name = f"{prefix}/{name}"
    name = name if extended.name is None else extended.name
    name = _decoded(pax["path"]).rstrip("/") if "path" in pax else name
    name = _decoded(pax.get("GNU.sparse.name", b"")) or name
    name = name.rstrip("/") if kind == tarfile.DIRTYPE else name
    try:
        stored = 0 if kind in _WITHOUT_DATA else number(pax["size"]) if "size" in pax else size
    except ValueError as error:
        raise tarfile.ReadError(f"damaged header at byte {position - BLOCK}: {error}") from None
    is_sparse = kind == tarfile.GNUTYPE_SPARSE or any(keyword.startswith(SPARSE) for keyword in pax)
    member = Member(name, kind, stored, stored, extended.offset, position, _time(block[136:148]), is_sparse)
    if kind == tarfile.LNKTYPE:
        link = text_of(block[157:257]) if extended.link is None else extended.link
        member = replace(member, link=_decoded(pax["linkpath"]) if "linkpath" in pax else link)
    return member


def with_segments(member: Member, block: bytes, fields: bytes, extended: Extended) -> Member:
    """Return a sparse member with the size of its content and its segments, or with the error of its map. `fields` is
    the map in the header `block` and behind it, in GNU's old sparse format."""
    pax = extended.pax
    try:
        if member.type == tarfile.GNUTYPE_SPARSE:
            return replace(member, size=_field(block[483:495], "size"), segments=_old_segments(fields))
        size = pax.get("GNU.sparse.realsize") or pax.get("GNU.sparse.size")
        member = member if size is None else replace(member, size=number(size))
        if pax.get("GNU.sparse.major", b"0") != b"0":
            return member
        return replace(member, segments=segments_of(list(map(number, extended.values))))
    except ValueError as error:
        return replace(member, error=str(error))


def segments_of(values: list[int]) -> tuple[tuple[int, int], ...]:
    """Return pairs of offset and size; ValueError for an odd number of values."""
    return tuple(zip(values[::2], values[1::2], strict=True))


def kind_and_size(block: bytes, position: int) -> tuple[bytes, int]:
    """Return type and size in a member's header; ReadError for a damaged header."""
    if len(block) < BLOCK:
        raise tarfile.ReadError(f"damaged header at byte {position}: it is cut short")
    try:
        if tarfile.nti(block[148:156]) not in tarfile.calc_chksums(block):  # type: ignore[attr-defined]
            raise ValueError("bad checksum")
        return block[156:157], _field(block[124:136], "size")
    except (tarfile.HeaderError, ValueError) as error:
        raise tarfile.ReadError(f"damaged header at byte {position}: {error}") from None


def records_of(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield keyword and value of each record of a pax header: `<length> <keyword>=<value>`, and a line feed."""
    position = 0
    while position < len(data) and data[position]:
        space = data.find(b" ", position, position + _MAX_DIGITS)
        digits = data[position : max(position, space)]
        end = position + (int(digits) if digits.isdigit() else 0)
        keyword, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not (space < end <= len(data) and equals and data[end - 1] == ord("\n")):
            raise tarfile.ReadError("damaged header: a pax record is damaged")
        yield _decoded(keyword), value
        position = end


def padded(size: int) -> int:
    """Return the bytes of whole blocks that hold `size` bytes."""
    return -(-size // BLOCK) * BLOCK


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def text_of(data: bytes) -> str:
    return _decoded(data.partition(b"\0")[0])


def number(text: bytes) -> int:
    """Parse a decimal number without a sign; ValueError for anything else."""
    if not text.isdigit() or len(text) > _MAX_DIGITS:
        raise ValueError(f"{text[:30]!r} is no size")
    return int(text)


def _field(data: bytes, what: str) -> int:
    """Parse a number in octal digits or base 256; ValueError for anything else, and for negative numbers."""
    try:
        value = int(tarfile.nti(data))  # type: ignore[attr-defined]
    except tarfile.HeaderError:
        raise ValueError(f"the {what} {data!r} is no number") from None
    if value < 0:
        raise ValueError(f"a negative {what}")
    return value


def _time(data: bytes) -> int:
    try:
        return _field(data, "time")
    except ValueError:
        return 0


def _old_segments(fields: bytes) -> tuple[tuple[int, int], ...]:
    """Return the segments in the fields of GNU's old sparse format, 24 bytes each; the others are zeros."""
    pairs = ((fields[start : start + 12], fields[start + 12 : start + 24]) for start in range(0, len(fields) - 23, 24))
    return tuple((_field(offset, "offset"), _field(size, "size")) for offset, size in pairs if size.strip(b"\0"))
