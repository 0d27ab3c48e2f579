"""The manifest: the frozen, sorted listing of a source, stored as Parquet in `_job/manifest/`.

Holds Arrow columns, not objects, so that ten million files fit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from configs.load import ConfigError
from configs.schema import Source, SourceColumns
from pipeline.prompts import templates
from pipeline.prompts.row_options import Asking
from pipeline.rows.schemas import SCHEMA_VERSION, SCHEMA_VERSION_KEY, find_read, find_reserved
from pipeline.source.ids import find_repeats
from pipeline.sources import kind_of
from pipeline.sources.kind import Entry, FilePiece, Kind, Needs, ReadSpec, no_row_groups
from pipeline.storage import access
from pipeline.storage.listing import Listed, Skipped, list_paths, told_skipped
from pipeline.storage.output_dir import OutputDir

SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("size_bytes", pa.int64()),
        ("token", pa.string()),
        ("num_samples", pa.int64()),
        ("row_group_rows", pa.list_(pa.int64())),
        ("row_group_bytes", pa.list_(pa.int64())),
        ("row_group_lines", pa.list_(pa.int64())),
        ("repeated_rows", pa.list_(pa.int64())),
    ]
)
"""`path` is relative to the source root; `token` is the etag or modification time; `num_samples` is null if only
reading gives the number; the row groups' rows and uncompressed bytes are empty if there are none. Files of lines and
large tars have groups too, at whose beginnings a span may start, and the lines of each (0 in tars). Repeated rows
have an id that an earlier row has."""
MAX_REPEATED_ROWS = 1000
"""So many may repeat others in any source; in a large one up to half of all rows."""
GROUP_COLUMNS = ("row_group_rows", "row_group_bytes", "row_group_lines")

PARTS = "_job/manifest"
ROOT_KEY = b"draftfleet.source_root"
KEEP_KEY = b"draftfleet.keep_schema"
_LISTING_CHUNK = 65_536


@dataclass(frozen=True)
class Manifest:
    """A frozen listing: `root` as a URL, `files` with the columns of `SCHEMA`, the kept columns' types.

    The first `written` files are in `num_parts` parts of the output already.
    """

    root: str
    files: pa.Table
    keep: pa.Schema
    written: int = 0
    num_parts: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    """How many files of the source's folders are not listed, by suffix."""

    @property
    def num_files(self) -> int:
        """How many files are listed."""
        return int(self.files.num_rows)

    @property
    def num_bytes(self) -> int:
        """Their sizes together."""
        return int(pc.sum(self.files["size_bytes"]).as_py() or 0)

    @property
    def num_samples(self) -> int | None:
        """How many samples there are, None when some file's count is unknown."""
        counts = self.files["num_samples"]
        return None if counts.null_count else int(pc.sum(counts).as_py() or 0)

    def entry(self, file: int, start: int) -> Entry:
        """The last group at or before row `start` of a file of lines or a tar; other kinds find rows themselves."""
        if not start:
            return Entry()
        if file not in self._group_ends:
            self._group_ends.clear()  # spans ask file by file
            lists = [self.files[name][file].values for name in GROUP_COLUMNS]
            self._group_ends[file] = [np.cumsum(values.to_numpy()) for values in lists if len(values)]
        ends = self._group_ends[file]
        if len(ends) < len(GROUP_COLUMNS):
            return Entry()
        number = int(np.searchsorted(ends[0], start, side="right"))
        if not number:
            return Entry()
        row, offset, line = (int(end[number - 1]) for end in ends)
        return Entry(row, offset, line + 1)

    @cached_property
    def _group_ends(self) -> dict[int, list[Any]]:
        return {}

    def write(self, output: OutputDir) -> None:
        """Create the next part from the files that are in no part yet, whole or not at all; a part never changes.

        Raises:
            FileExistsError: another attempt has created this part with other files.
        """
        if self.written == self.num_files:
            return
        metadata = {
            SCHEMA_VERSION_KEY: str(SCHEMA_VERSION).encode(),
            ROOT_KEY: access.shown(self.root).encode(),
            KEEP_KEY: self.keep.serialize().to_pybytes().hex().encode(),
        }
        sink = pa.BufferOutputStream()
        pq.write_table(self.files.slice(self.written).replace_schema_metadata(metadata), sink, compression="zstd")
        output.create_bytes(f"{PARTS}/part-{self.num_parts:05d}.parquet", sink.getvalue())


def needs_of(source: Source, asking: Asking, keep_columns: Sequence[str] | Mapping[str, str]) -> Needs:
    """The columns that a job reads; a mapping names the field of the job file for each of `keep_columns`, which then
    stay inside the job.

    Raises:
        ConfigError: the prompt has a lone brace or no turn for images, or a kept name occurs twice or collides.
    """
    fields = asking.fields()
    if isinstance(keep_columns, Mapping):
        for name in find_read(tuple(keep_columns)):
            raise ConfigError(f"{keep_columns[name]}: {name!r} is a name of our own; rename the column in the source")
        return Needs(source, fields, tuple(keep_columns), dict(keep_columns))
    for name in find_reserved(keep_columns):
        raise ConfigError(f"sink.keep_columns: {name!r} is a column of the output itself; rename it in the source")
    if len({name.lower() for name in keep_columns}) != len(keep_columns):
        raise ConfigError("sink.keep_columns: a column is named twice (upper and lower case are the same here)")
    for what, column in (("image", source.columns.image), ("video", source.columns.video)):
        if source.kind in ("images", "videos", "webdataset", "text") and column is not None:
            raise ConfigError(f"source.columns.{what}: source.kind {source.kind!r} has no {what} column")
    return Needs(source, fields, tuple(keep_columns))


def freeze(
    source: Source,
    asking: Asking,
    keep_columns: Sequence[str] | Mapping[str, str] = (),
    output: OutputDir | None = None,
) -> Manifest:
    """List the source, survey its files, and write the manifest if there is an output.

    Raises:
        ConfigError: the source is missing or empty, or the prompt or the kept columns do not fit it; names the path.
    """
    return freeze_for(needs_of(source, asking, keep_columns), output)


def freeze_for(needs: Needs, output: OutputDir | None = None) -> Manifest:
    """As `freeze`, for needs that have been put together elsewhere."""
    skipped = Skipped()
    filesystem, root, files = list_source(needs.source, skipped)
    manifest = replace(survey_files(filesystem, root, files, needs), skipped=dict(skipped.counts))
    if manifest.num_samples == 0:
        raise ConfigError(f"source.path: the files at {_told(needs.source)} hold no rows")
    if output is not None:
        manifest.write(output)
    return manifest


def list_source(source: Source, skipped: Skipped | None = None) -> tuple[Any, str, pa.Table]:
    """The source's file system, its root in it, and the sorted listing: path, size and token of every file.

    Files of the source's folders that its kind does not read are counted in `skipped`.

    Raises:
        ConfigError: the source is missing or empty.
    """
    kind = kind_of(source.kind)
    filesystem, paths = _open_paths(source)
    skipped = Skipped() if skipped is None else skipped
    try:
        list_units = kind.list_units or functools.partial(
            list_paths, suffixes=kind.suffixes, skipped=skipped, local_roots=source.local_roots
        )
        root, listing = list_units(filesystem, paths)
        files = _table(listing)
    except ConfigError:
        raise
    except Exception as error:  # drivers raise what they like, from OSError to errors of HTTP
        where = getattr(error, "filename", None) or _told(source)
        raise ConfigError(
            f"source.path: {access.shown(str(where))} cannot be listed: {access.reason_of(error)}"
        ) from None
    if not files.num_rows:
        raise ConfigError(
            f"source.path: nothing to read at {_told(source)}; source.kind {source.kind!r} reads "
            f"{', '.join('*' + suffix for suffix in kind.suffixes)} in folders, and whatever a glob or a file names"
            + (f"; there are {told_skipped(skipped.counts, source.kind)}" if skipped.counts else "")
        )
    return filesystem, root, files


def _told(source: Source) -> str:
    return " and ".join(access.shown(path) for path in source.paths)


def survey_files(filesystem: Any, root: str, files: pa.Table, needs: Needs, known: Manifest | None = None) -> Manifest:
    """Open the listed files as far as their kind needs; `known` are files before them, whose ids count as earlier.

    Raises:
        ConfigError: the files lack a needed column, or most ids are there several times.
    """
    found = kind_of(needs.source.kind).survey(filesystem, root, files, needs)
    columns = [found.num_samples, found.row_group_rows, found.row_group_bytes, found.row_group_lines]
    listed = pa.table([*files.columns, found.num_samples], names=["path", "size_bytes", "token", "num_samples"])
    num_known = 0
    if known is not None:
        num_known = known.num_files
        listed = pa.concat_tables([known.files.select(listed.column_names), listed])
    repeated = _repeated_rows(filesystem, root, needs.source, listed).slice(num_known)
    files = pa.table([*files.columns, *columns, repeated], schema=SCHEMA)
    return Manifest(access.unstripped(filesystem, root), files, found.keep)


def _repeated_rows(filesystem: Any, root: str, source: Source, files: pa.Table) -> pa.Array:
    """For every file the rows whose id an earlier row has; for kinds with ids before reading, if the source has an id
    column.

    Raises:
        ConfigError: most of the rows have an id that others have, too.
    """
    kind = kind_of(source.kind)
    found: dict[int, list[int]] = {}
    if source.id_column is not None and source.check_ids and kind.tells_ids:
        alone = source.model_copy(update={"columns": SourceColumns()})
        spec = ReadSpec(alone, root, (), pa.schema([]), with_images=False)
        pieces = [
            FilePiece(file["path"], num_samples=file["num_samples"], size_bytes=file["size_bytes"], token=file["token"])
            for file in files.to_pylist()
        ]
        found = find_repeats([functools.partial(_own_ids, filesystem, spec, kind, piece) for piece in pieces])
        num_repeated, num_rows = sum(map(len, found.values())), pc.sum(files["num_samples"]).as_py() or 0
        if num_repeated > max(MAX_REPEATED_ROWS, num_rows // 2):
            raise ConfigError(
                f"source.id_column: {source.id_column!r} is no id: {num_repeated:,} of {num_rows:,} rows have one that "
                "an earlier row has"
            )
    if not found:
        return no_row_groups(files.num_rows)
    return pa.array([found.get(index, []) for index in range(files.num_rows)], pa.list_(pa.int64()))


def _own_ids(filesystem: Any, spec: ReadSpec, kind: Kind, piece: FilePiece) -> Iterator[tuple[int, str]]:
    """The ids of a file, up to where it is damaged."""
    try:
        for chunk in kind.read(filesystem, spec, piece):
            for sample in chunk.samples:
                if sample.own_id is not None:
                    yield sample.row_index, sample.own_id
    except Exception:  # the read task reports the error
        return


def _open_paths(source: Source) -> tuple[Any, list[str]]:
    """The one file system of all paths, and the paths in it."""
    opened = [access.open_url(path, "source.path") for path in source.paths]
    if any(filesystem is not opened[0][0] for filesystem, _ in opened):
        raise ConfigError("source.path: the paths of one source lie in one store; start a job for each store")
    return opened[0][0], [path for _, path in opened]


def _table(listing: Iterable[Listed]) -> pa.Table:
    """The sorted listing (by path, as bytes) as the first three columns of `SCHEMA`.

    Raises:
        ConfigError: a file's name is not valid UTF-8, so no column could hold it.
    """
    schema = pa.schema([SCHEMA.field(index) for index in range(3)])
    batches = []
    stream = iter(listing)
    while chunk := list(islice(stream, _LISTING_CHUNK)):
        try:
            columns = zip(*chunk, strict=True)
            batches.append(pa.record_batch([pa.array(c, t) for c, t in zip(columns, schema.types)], schema=schema))
        except UnicodeEncodeError:
            bad = next(one.path for one in chunk if templates.whole_text(one.path) != one.path)
            raise ConfigError(
                f"source.path: the file name {bad.encode('utf-8', 'backslashreplace').decode()} is not valid UTF-8; "
                "rename the file"
            ) from None
    table = pa.Table.from_batches(batches, schema)
    paths = table["path"]
    if pc.all(pc.less(paths.slice(0, max(0, len(paths) - 1)), paths.slice(1))).as_py():
        return table  # as object stores list; one piece of it all would be twice the memory
    return table.take(pc.sort_indices(paths)).combine_chunks()
