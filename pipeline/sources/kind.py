"""The interface of source kinds: the facts of their files, and the samples of a piece of one file.

Defines the shared shapes (`Needs`, `ReadSpec`, `Sample`, `Chunk`, `Kind`) and rules about ids and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from configs.load import ConfigError
from configs.schema import Source
from pipeline.rows.schemas import RowError
from pipeline.storage.listing import Listed

MIN_SPAN_BYTES = 16 * 1024 * 1024
MAX_EXPANSION = 8
TEXT_MAX_BYTES = 16 * 1024 * 1024
"""The most that a text or JSON member of a sample may hold."""


@dataclass(frozen=True)
class Needs:
    """The columns that a job reads: by the prompt (name to dotted path), to keep, and the source section itself."""

    source: Source
    fields: dict[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    keep_paths: dict[str, str] = field(default_factory=dict)
    """Where the job file asks for a kept column, other than in `sink.keep_columns`."""
    with_images: bool = True
    """Whether samples are made of images or videos."""

    def columns(self) -> dict[str, str]:
        """Every needed column with the dotted path that names it."""
        named = dict(self.fields)
        for name in self.keep:
            named.setdefault(name, self.keep_paths.get(name, "sink.keep_columns"))
        if self.source.id_column is not None:
            named.setdefault(self.source.id_column, "source.id_column")
        if self.source.columns.image is not None:
            named.setdefault(self.source.columns.image, "source.columns.image")
        if self.source.columns.video is not None:
            named.setdefault(self.source.columns.video, "source.columns.video")
        return named

    def require(self, available: Collection[str], where: str) -> None:
        """Refuse columns that are not there.

        Raises:
            ConfigError: names the dotted path, the column and the columns that exist.
        """
        for name, dotted in self.columns().items():
            if name not in available:
                there = ", ".join(sorted(available)) if available else "none"
                raise ConfigError(f"{dotted}: the column {name!r} is not in {where}; columns there: {there}")


@dataclass(frozen=True)
class Survey:
    """Facts of the listed files before reading them, one entry per file.

    `num_samples` holds None if only reading gives the number; the row groups of a file are empty if there are none.
    Files of lines have groups as well, with bytes of the (decompressed) file; only they have lines.
    """

    num_samples: pa.Array
    row_group_rows: pa.Array
    row_group_bytes: pa.Array
    keep: pa.Schema
    row_group_lines: pa.Array


@dataclass(frozen=True)
class ReadSpec:
    """All that a read task needs beside its own pieces; small, because every task carries it.

    `root` travels as a URL; the kinds get it as a path of their file system.
    """

    source: Source
    root: str
    fields: tuple[str, ...]
    keep: pa.Schema
    with_images: bool = True
    """Whether a sample is made of images; without, they are neither read nor missed."""

    @property
    def needs_text(self) -> bool:
        """Whether anything but the images is asked for."""
        return bool(self.fields) or len(self.keep) > 0 or self.source.id_column is not None


class Entry(NamedTuple):
    """A place where reading a file can begin: its row, its byte, and its line number from 1."""

    row: int = 0
    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class FilePiece:
    """Rows `start` to `stop` of one file; `num_samples` is the whole file's count when the manifest was frozen.

    `entry` is the last place at or before `start` where reading can begin: the beginning of the file if the kind has no
    other.
    """

    path: str
    start: int = 0
    stop: int | None = None
    num_samples: int | None = None
    entry: Entry = field(default=Entry())
    size_bytes: int = 0
    token: str = ""
    repeated: frozenset[int] = frozenset()
    """Rows whose id an earlier row of the source has."""
    ordinal: int = -1
    """The file's place in the manifest."""
    left_out: bytes = b""
    """One bit for each row from `start` on: rows that are done, in `numpy.packbits`' order; rows beyond it are not."""

    def leaves_out(self, row: int) -> bool:
        """Whether a row is done and must not be yielded again."""
        byte, bit = divmod(row - self.start, 8)
        return 0 <= byte < len(self.left_out) and bool(self.left_out[byte] >> (7 - bit) & 1)

    @property
    def num_left_out(self) -> int:
        """How many rows are left out."""
        return int.from_bytes(self.left_out, "big").bit_count()


@dataclass(frozen=True)
class VideoRef:
    """The location of a video: its bytes, a URI of a row, or a listed file (`path` relative to the source root), of
    which it is the `size` bytes from `offset` if those are set."""

    bytes: bytes | None = None
    uri: str | None = None
    path: str | None = None
    offset: int | None = None
    size: int | None = None


@dataclass
class Sample:
    """One sample as read: its images are bytes or URIs; `own_id` is the id column's value, None where the source has
    none or the row lacks it."""

    row_index: int
    images: list[bytes | str] = field(default_factory=list)
    videos: list[VideoRef] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    own_id: str | None = None
    error: RowError | None = None


@dataclass(frozen=True)
class Chunk:
    """Some samples in order, and one array per kept column, aligned with them."""

    samples: list[Sample]
    keep: list[pa.Array]


@dataclass(frozen=True)
class Kind:
    """A source kind: its suffixes in folders, and its three functions.

    `survey(filesystem, root, files, needs)`, of a listing's paths and sizes, raises ConfigError for columns that do not
    fit. `read(filesystem, spec, piece)` yields chunks and may raise anything for a damaged file: chunks that it has
    yielded stay. `count(filesystem, spec, path, at_most)` counts the samples of a file of unknown count.
    `list_units(filesystem, paths)` replaces the listing of files if samples are not in files of their own. `tells_ids`
    is true if reading only ids costs less than reading everything.
    """

    name: str
    suffixes: tuple[str, ...]
    survey: Callable[[Any, str, pa.Table, Needs], Survey]
    read: Callable[[Any, ReadSpec, FilePiece], Iterator[Chunk]]
    count: Callable[[Any, ReadSpec, str, int], int]
    list_units: Callable[[Any, Sequence[str]], tuple[str, Iterator[Listed]]] | None = None
    tells_ids: bool = True


def max_bytes_of(spec: ReadSpec, piece: FilePiece) -> int:
    """What a piece may take in memory: one that takes more has been packed, and is cut off."""
    return max(MAX_EXPANSION * max(spec.source.span_max_bytes, MIN_SPAN_BYTES), 2 * piece.size_bytes)


_BYTE = "draftfleet_byte"


@contextmanager
def noting_byte(position: Callable[[], int]) -> Iterator[None]:
    """Note on an error that passes how far a file was read, by the position then."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # neither a closed file nor an error without attributes may hide the error itself
            setattr(error, _BYTE, position())
        raise


def byte_of(error: Exception) -> int | None:
    """The byte up to which a damaged file was read, None if its reader does not report it."""
    return getattr(error, _BYTE, None)


def no_row_groups(num_files: int) -> pa.Array:
    """An empty list for every file."""
    offsets = pa.array(np.zeros(num_files + 1, np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array([], pa.int64()))


def resolve_id(value: Any, column: str) -> str:
    """The id column's value as a string.

    Raises:
        RowError: `missing_id` for null and for the empty string.
    """
    if value is None or value == "":
        raise RowError("missing_id", f"the id column {column!r} has no value in this row")
    return str(value)
