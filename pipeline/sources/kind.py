"""The interface of source kinds: the facts of their files, and the samples of a piece of one file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from configs.load import ConfigError
from configs.schema import Source, SourceColumns
from pipeline.rows.schemas import RowError
from pipeline.storage.listing import Listed

MIN_SPAN_BYTES = 16 * 1024 * 1024
MAX_EXPANSION = 8
TEXT_MAX_BYTES = 16 * 1024 * 1024
"""The most that a line, or a text or JSON member of a sample, may hold."""


# --- before reading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """The columns that a job reads: `fields` of the prompt (name to dotted path), columns to keep, and the source."""

    source: Source
    fields: dict[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    keep_paths: dict[str, str] = field(default_factory=dict)
    """The dotted paths of kept columns that are not named in `sink.keep_columns`."""
    with_images: bool = True
    """Whether samples are made of images or videos."""

    def columns(self) -> dict[str, str]:
        """Every needed column with the dotted path that names it."""
        columns = dict(self.fields)
        for name in self.keep:
            columns.setdefault(name, self.keep_paths.get(name, "sink.keep_columns"))
        source = self.source
        for column, dotted in (
            (source.id_column, "source.id_column"),
            (source.columns.image, "source.columns.image"),
            (source.columns.video, "source.columns.video"),
        ):
            if column is not None:
                columns.setdefault(column, dotted)
        return columns

    def require(self, available: Collection[str], where: str) -> None:
        """Raise ConfigError for a needed column that is not available; names the columns that are."""
        for name, dotted in self.columns().items():
            if name not in available:
                columns = ", ".join(sorted(available)) if available else "none"
                raise ConfigError(f"{dotted}: the column {name!r} is not in {where}; columns there: {columns}")


@dataclass
class Index:
    """Groups of a file's rows: the rows, bytes and lines of each. Reading can begin only at groups with lines."""

    rows: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    def add(self, rows: int, num_bytes: int, lines: int) -> None:
        self.rows.append(rows)
        self.num_bytes.append(num_bytes)
        self.lines.append(lines)


FACTS = pa.schema(
    [
        ("num_samples", pa.int64()),
        ("row_group_rows", pa.list_(pa.int64())),
        ("row_group_bytes", pa.list_(pa.int64())),
        ("row_group_lines", pa.list_(pa.int64())),
    ]
)
"""What a survey finds per file: the number of samples (null if only reading gives it), and its groups of rows."""


@dataclass(frozen=True)
class Survey:
    """The `FACTS` of the listed files, and the types of the kept columns."""

    facts: pa.Table
    keep: pa.Schema


def survey_of(indices: Sequence[Index | None], keep: pa.Schema) -> Survey:
    """The survey of files with these indices; None is a file whose count is unknown."""
    groups = [Index() if index is None else index for index in indices]
    columns = [
        [None if index is None else sum(index.rows) for index in indices],
        [index.rows for index in groups],
        [index.num_bytes for index in groups],
        [index.lines for index in groups],
    ]
    return Survey(pa.table(columns, schema=FACTS), keep)


def no_row_groups(num_files: int) -> pa.Array:
    """An empty list for every file."""
    offsets = pa.array(np.zeros(num_files + 1, np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array([], pa.int64()))


# --- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadSpec:
    """What every read task needs besides its pieces. `root` travels as a URL; kinds get it as a path."""

    source: Source
    root: str
    fields: tuple[str, ...]
    keep: pa.Schema
    with_images: bool = True
    """Whether a sample is made of images; without, they are neither read nor missed."""

    @property
    def needs_text(self) -> bool:
        """Whether anything but the images is needed."""
        return bool(self.fields) or len(self.keep) > 0 or self.source.id_column is not None

    def with_ids_only(self, id_column: str | None) -> ReadSpec:
        """The same files with no column but that of the ids."""
        source = self.source.model_copy(update={"columns": SourceColumns(), "id_column": id_column})
        return ReadSpec(source, self.root, (), pa.schema([]), with_images=False)


class Entry(NamedTuple):
    """A place where reading a file can begin: its row, its byte, and its line number from 1."""

    row: int = 0
    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class FilePiece:
    """Rows `start` to `stop` (None: to the end) of one file; `num_samples` is the whole file's listed count.

    `entry` is the last place at or before `start` where reading can begin.
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
    done_bits: bytes = b""
    """One bit per row from `start` on, in `numpy.packbits` order: rows that are done; rows beyond it are not."""

    def is_done(self, row: int) -> bool:
        """Whether a row is done and must not be yielded again."""
        byte, bit = divmod(row - self.start, 8)
        return 0 <= byte < len(self.done_bits) and bool(self.done_bits[byte] >> (7 - bit) & 1)

    def check_end(self, row: int, what: str = "file") -> None:
        """Raise ValueError if the file ends at another row than when it was listed."""
        expected = self.num_samples if self.stop is None else self.stop
        if expected is not None and row != expected:
            raise ValueError(f"the {what} ends at row {row}, and had {expected} when the job began")


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
    """One sample as read: its images are bytes or URIs; `id_value` is the value of the id column, if any."""

    row_index: int
    images: list[bytes | str] = field(default_factory=list)
    videos: list[VideoRef] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    id_value: str | None = None
    error: RowError | None = None


@dataclass(frozen=True)
class Chunk:
    """Some samples in order, and one array per kept column, aligned with them."""

    samples: list[Sample]
    keep: list[pa.Array]


Count = Callable[[Any, ReadSpec, str, int], int]


@dataclass(frozen=True)
class Kind:
    """A source kind: its suffixes in folders, and its functions.

    `survey(filesystem, root, files, needs)` raises ConfigError for columns that do not fit; a file that it cannot read
    has an unknown count, and its read task reports the error. `read(filesystem, spec, piece)` yields chunks and may
    raise anything for a damaged or changed file; yielded chunks stay. `list_units(filesystem, paths)` replaces the
    listing of files. `has_cheap_ids` is true if reading only ids costs less than reading everything.
    """

    name: str
    suffixes: tuple[str, ...]
    survey: Callable[[Any, str, pa.Table, Needs], Survey]
    read: Callable[[Any, ReadSpec, FilePiece], Iterator[Chunk]]
    list_units: Callable[[Any, Sequence[str]], tuple[str, Iterator[Listed]]] | None = None
    has_cheap_ids: bool = True
    count_early: Count | None = None
    """Replaces `count` for kinds that yield all samples of a file together."""

    def count(self, filesystem: Any, spec: ReadSpec, path: str, at_most: int) -> int:
        """The samples of a file of unknown count, up to `at_most`; damage counts as the one row that it becomes."""
        if self.count_early is not None:
            return self.count_early(filesystem, spec, path, at_most)
        chunks = self.read(filesystem, spec.with_ids_only(None), FilePiece(path))
        return count_of((sample for chunk in chunks for sample in chunk.samples), at_most)


def count_of(samples: Iterator[Any], at_most: int) -> int:
    """The number of samples, up to `at_most`; an error counts as one."""
    count = 0
    try:
        while count < at_most and next(samples, None) is not None:
            count += 1
    except Exception:  # the read task reports the error
        count += 1
    return count


def max_bytes_of(spec: ReadSpec, piece: FilePiece) -> int:
    """The memory limit of a piece; a file that expands beyond it is cut off."""
    return max(MAX_EXPANSION * max(spec.source.span_max_bytes, MIN_SPAN_BYTES), 2 * piece.size_bytes)


_BYTE = "draftfleet_byte"


@contextmanager
def noting_byte(position: Callable[[], int]) -> Iterator[None]:
    """Store on a passing error how far the file was read."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # neither a closed file nor an error without attributes may hide the error itself
            setattr(error, _BYTE, position())
        raise


def byte_of(error: Exception) -> int | None:
    """The byte up to which a damaged file was read, None if its reader does not report it."""
    return getattr(error, _BYTE, None)


def resolve_id(value: Any, column: str) -> str:
    """The id column's value as a string; RowError `missing_id` for null and the empty string."""
    if value is None or value == "":
        raise RowError("missing_id", f"the id column {column!r} has no value in this row")
    return str(value)
