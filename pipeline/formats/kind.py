"""Defines the interface of source kinds: a survey of files before the job, and reading the samples of a piece."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.load import ConfigError
from configs.source import SourceColumnsConfig, SourceConfig
from pipeline.formats.limits import MAX_EXPANSION, MAX_SPAN_EXPANSION, MIN_SPAN_BYTES
from pipeline.rows.schemas import RowError
from pipeline.storage.listing import Listed


@dataclass(frozen=True)
class Needs:
    """The columns that a job reads: `fields` of the prompt (name to dotted path), kept columns, columns of `source`."""

    source: SourceConfig
    fields: dict[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    keep_paths: dict[str, str] = field(default_factory=dict)
    """Dotted paths of kept columns, by name, if they do not come from `sink.keep_columns`."""
    with_images: bool = True
    """Whether the job reads images or videos."""

    def columns(self) -> dict[str, str]:
        """Return every needed column with the dotted path that names it."""
        columns = dict(self.fields)
        for name in self.keep:
            columns.setdefault(name, self.keep_paths.get(name, "sink.keep_columns"))
        given = {"id_column": self.source.id_column, **{f"columns.{k}": v for k, v in self.source.columns}}
        for dotted, column in given.items():
            if column is not None:
                columns.setdefault(column, f"source.{dotted}")
        return columns

    def require(self, available: Collection[str], where: str) -> None:
        """Raise ConfigError for a needed column that is not available; the message lists the available columns."""
        for name, dotted in self.columns().items():
            if name not in available:
                columns = ", ".join(sorted(available)) if available else "none"
                raise ConfigError(f"{dotted}: the column {name!r} is not in {where}; columns there: {columns}")


@dataclass
class Index:
    """Row groups of a file or range: rows, bytes and lines of each. Without `lines`, the reader finds rows itself.

    `begin` is the byte at which the first record of a range begins; −1 if none does.
    """

    rows: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    begin: int = -1

    def add(self, rows: int, num_bytes: int, lines: int) -> None:
        self.rows.append(rows)
        self.num_bytes.append(num_bytes)
        self.lines.append(lines)


RANGES = pa.schema([("start", pa.int64()), ("stop", pa.int64())])
"""Columns that a survey's files have besides the listing: the first byte of the surveyed range, and the byte after its
last one (null: the end of the file)."""
_ROW_GROUPS = [(f"row_group_{name}", pa.list_(pa.int64())) for name in ("rows", "bytes", "lines")]
FACTS = pa.schema([("num_samples", pa.int64()), *_ROW_GROUPS])
"""Columns of a survey, one row per file: number of samples (null if known only after reading), and row groups."""


@dataclass(frozen=True)
class Survey:
    """The `FACTS` of the surveyed files or ranges, and the different schemas of files with column types, each with the
    path of the first file that has it. For kinds whose files can be split, `begins` has the byte at which the first
    record of each range begins, as `Index.begin`."""

    facts: pa.Table
    schemas: tuple[tuple[str, pa.Schema], ...] = ()
    begins: tuple[int, ...] = ()


def survey_of(indices: Sequence[Index | None], schemas: Sequence[tuple[str, pa.Schema]] = ()) -> Survey:
    """Build a survey from one index per file or range; None means that its count is unknown."""
    groups = [index or Index() for index in indices]
    columns = [[getattr(index, name) for index in groups] for name in ("rows", "num_bytes", "lines")]
    counts = [None if index is None else sum(index.rows) for index in indices]
    return Survey(pa.table([counts, *columns], schema=FACTS), tuple(schemas), tuple(index.begin for index in groups))


def no_row_groups(num_files: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.zeros(num_files + 1, np.int32)), pa.array([], pa.int64()))


@dataclass(frozen=True)
class ReadSpec:
    """Parameters of all read tasks. `root` is a URL when pickled, and a path of the file system for kinds."""

    source: SourceConfig
    root: str
    fields: tuple[str, ...]
    keep: pa.Schema
    with_images: bool = True
    """Whether images and videos are read; if not, a sample without media is no error."""
    has_conversations: bool = False
    """Whether the job's prompts are conversations in the rows, which have places for media."""

    def may_lack(self, cell: Any) -> bool:
        """Return whether a row is asked as text if its columns of images and videos have this value and no medium."""
        rule = self.source.text_only_rows
        return rule == "always" or (rule == "auto" and (self.has_conversations or cell == []))

    @property
    def needs_text(self) -> bool:
        """Whether fields, kept columns or ids are needed besides media."""
        return bool(self.fields) or len(self.keep) > 0 or self.source.id_column is not None

    def with_ids_only(self, id_column: str | None) -> ReadSpec:
        source = self.source.model_copy(update={"columns": SourceColumnsConfig(), "id_column": id_column})
        return ReadSpec(source, self.root, (), pa.schema([]), with_images=False)


class Entry(NamedTuple):
    """A position at which reading a file can begin: row and byte offset from 0, line number from 1."""

    row: int = 0
    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class FilePiece:
    """Rows `start` to `stop` (exclusive; None: to the end) of one file with `num_samples` rows. `entry` is the last
    position at or before `start` at which reading can begin."""

    path: str
    start: int = 0
    stop: int | None = None
    num_samples: int | None = None
    entry: Entry = field(default=Entry())
    size_bytes: int = 0
    token: str = ""
    repeated: frozenset[int] = frozenset()
    """Rows of the piece whose id an earlier row of the source has."""
    ordinal: int = -1
    """The file's index in the manifest."""
    done_bits: bytes = b""
    """One bit per row from `start` on, in `numpy.packbits` order: 1 if the row is done; further rows are not done."""

    def is_done(self, row: int) -> bool:
        """Return whether a row is done and must not be yielded again."""
        byte, bit = divmod(row - self.start, 8)
        return 0 <= byte < len(self.done_bits) and bool(self.done_bits[byte] >> (7 - bit) & 1)

    def check_end(self, row: int, what: str = "file") -> None:
        """Raise ValueError if the file ends at `row` and had another number of rows when it was listed."""
        expected = self.num_samples if self.stop is None else self.stop
        if expected is not None and row != expected:
            raise ValueError(f"the {what} ends at row {row}, and had {expected} when the job began")


@dataclass(frozen=True)
class VideoRef:
    """The location of a video: its bytes, a URI in a row, or a listed file (`path` relative to the source root), of
    which it is the bytes `offset` to `offset + size` if these are set."""

    bytes: bytes | None = None
    uri: str | None = None
    path: str | None = None
    offset: int | None = None
    size: int | None = None


@dataclass
class Sample:
    """One sample as read: images are bytes or URIs; `id_value` is the value of the id column, if one is configured."""

    row_index: int
    images: list[bytes | str] = field(default_factory=list)
    videos: list[VideoRef] = field(default_factory=list)
    fields: dict[str, Any] | str = field(default_factory=dict)
    """The prompt's values by name, or a JSON object of them, which takes less memory."""
    id_value: str | None = None
    error: RowError | None = None


@dataclass(frozen=True)
class Chunk:
    """Samples in order, and one array per kept column with one value per sample."""

    samples: list[Sample]
    keep: list[pa.Array]


class IdRows(NamedTuple):
    """Row indices of samples in their file, and the ids of these samples as `large_string`."""

    rows: NDArray[np.int64]
    ids: pa.Array

    @classmethod
    def of(cls, chunk: Chunk) -> IdRows:
        """Return the ids of a chunk."""
        pairs = [(sample.row_index, sample.id_value) for sample in chunk.samples if sample.id_value is not None]
        rows = np.fromiter((row for row, _ in pairs), np.int64, len(pairs))
        return cls(rows, pa.array([value for _, value in pairs], pa.large_string()))


class SurveyCost(Enum):
    """The part of a file that a survey reads."""

    NOTHING = "nothing"
    FOOTER = "footer"
    CONTENT = "content"


@dataclass(frozen=True)
class Selected:
    """The kind that surveys the files, and a mask of the files that hold rows; the others have none."""

    kind: SourceKind
    used: Sequence[bool]


def _never(path: str) -> bool:
    return False


@dataclass(frozen=True)
class SourceKind:
    """A source kind: the suffixes of its files in folders, and its functions.

    `survey(filesystem, root, files, needs)` counts the samples of some of the listed files, in any process; a file that
    it cannot read has an unknown count, and its read task reports the error. `read(filesystem, spec, piece)` yields
    chunks and may raise any exception for a damaged or changed file; earlier chunks are kept. `list_units(filesystem,
    paths)` replaces the listing of files. `has_cheap_ids` is true if reading only ids is cheaper than reading whole
    rows. `survey` (None if `select` returns another kind) and `select` raise ConfigError for missing or unusable
    columns.
    """

    name: str
    suffixes: tuple[str, ...]
    survey: Callable[[Any, str, pa.Table, Needs], Survey] | None
    read: Callable[[Any, ReadSpec, FilePiece], Iterator[Chunk]]
    list_units: Callable[[Any, Sequence[str]], tuple[str, Iterator[Listed]]] | None = None
    has_cheap_ids: bool = True
    select: Callable[[Any, str, pa.Table, Needs], Selected | None] | None = None
    """`select(filesystem, root, files, needs)` makes the checks that need the whole listing, before the survey. It may
    return the kind that surveys the files, and which of them hold rows."""
    cost: SurveyCost = SurveyCost.FOOTER
    other_suffixes: tuple[str, ...] = ()
    """Suffixes of the files that are read in folders without a file of `suffixes`."""
    can_split: Callable[[str], bool] = _never
    """`can_split(path)` returns whether ranges of bytes of this file can be surveyed. A range has the records that
    begin in it, if a record begins at its first line; the survey of a range that begins inside a record is repeated."""
    read_ids: Callable[[Any, ReadSpec, FilePiece], Iterator[IdRows]] | None = None
    """Implementation of `ids` for kinds that read ids without samples."""
    count_early: Callable[[Any, ReadSpec, str, int], int] | None = None
    """Implementation of `count` for kinds whose `read` yields all samples of a file in one chunk."""

    def ids(self, filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[IdRows]:
        """Yield the ids of a piece in order; rows without an id are left out. `spec` reads ids only; raises like
        `read`."""
        if self.read_ids is not None:
            yield from self.read_ids(filesystem, spec, piece)
            return
        for chunk in self.read(filesystem, spec, piece):
            yield IdRows.of(chunk)

    def count(self, filesystem: Any, spec: ReadSpec, path: str, at_most: int) -> int:
        """Count the samples of a file of unknown count, up to `at_most`; damage counts as one sample, its error row."""
        if self.count_early is not None:
            return self.count_early(filesystem, spec, path, at_most)
        chunks = self.read(filesystem, spec.with_ids_only(None), FilePiece(path))
        return count_of((sample for chunk in chunks for sample in chunk.samples), at_most)


def count_of(samples: Iterator[Any], at_most: int) -> int:
    """Count samples up to `at_most`; an exception counts as one sample."""
    count = 0
    try:
        while count < at_most and next(samples, None) is not None:
            count += 1
    except Exception:  # the read task reports the error
        count += 1
    return count


def max_bytes_of(spec: ReadSpec, sizes_bytes: Sequence[int]) -> int:
    """Return the memory limit in bytes of rows from files of these sizes (0: unknown); reading fails beyond it."""
    size, at_least = sum(sizes_bytes), MAX_SPAN_EXPANSION * MIN_SPAN_BYTES
    most = max(at_least, MAX_SPAN_EXPANSION * spec.source.span_max_bytes, 2 * size)
    return most if 0 in sizes_bytes else min(most, max(at_least, MAX_EXPANSION * size))


_BYTE = "draftfleet_byte"


@contextmanager
def noting_byte(position: Callable[[], int]) -> Iterator[None]:
    """Attach the current byte position of the file to any exception from the context, for `byte_of`."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # a closed file or an exception without attributes must not hide the error
            setattr(error, _BYTE, position())
        raise


def byte_of(error: Exception) -> int | None:
    """Return the byte position up to which a damaged file was read; None if its reader does not report it."""
    return getattr(error, _BYTE, None)


MAX_INTEGRAL = 2**53
"""Floats below this number are integers exactly."""
_INTEGRAL = re.compile(r"[+-]?\d{1,15}\.0+")


def resolve_id(value: Any, column: str, source: SourceConfig | None = None) -> str:
    """Convert the id column's value to a string, and numbers without a fraction to integers; with `source`, text and
    floats follow `source.integral_ids`. RowError `missing_id` for null and the empty string, `invalid_value` for other
    floats and decimals, and for lists and objects."""
    if value is None or value == "":
        raise RowError("missing_id", f"the id column {column!r} has no value in this row")
    as_integer = source is None or source.integral_ids
    if isinstance(value, str):
        return str(int(value.partition(".")[0])) if source and as_integer and _INTEGRAL.fullmatch(value) else value
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return str(int(value))
    if isinstance(value, float) and as_integer and value.is_integer() and abs(value) < MAX_INTEGRAL:
        return str(int(value))
    if isinstance(value, bool | float | Decimal | list | dict):
        message = f"the id column {column!r} holds {reprlib.repr(value)[:100]}; ids are text or integers"
        raise RowError("invalid_value", message)
    return str(value)
