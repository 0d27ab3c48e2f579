"""The manifest of a source: a frozen, sorted listing with the facts of its survey, stored in `_job/manifest/`.

Files are rows of an Arrow table, not Python objects, so that ten million files fit in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.formats.kind import FACTS, Entry
from pipeline.manifest.done_bitmap import UNKNOWN, Ints
from pipeline.manifest.shards import Cut, cut
from pipeline.rows.schemas import SCHEMA_VERSION, SCHEMA_VERSION_KEY
from pipeline.storage import access
from pipeline.storage.output_dir import OutputDir

LISTING = pa.schema([("path", pa.string()), ("size_bytes", pa.int64()), ("token", pa.string())])
"""`path` is relative to the source root; `token` is the etag or modification time."""
SCHEMA = pa.schema([*LISTING, *FACTS, pa.field("repeated_rows", pa.list_(pa.int64()))])
"""The listing, the facts from the survey of the source kind, and the rows whose id an earlier row has. A span may start
at the beginning of a row group."""

PARTS = "_job/manifest"
ROOT_KEY = b"draftfleet.source_root"
KEEP_KEY = b"draftfleet.keep_schema"
CUT_KEY = b"draftfleet.shards"


@dataclass(frozen=True)
class Manifest:
    """A frozen listing: `root` as a URL, `files` with the columns of `SCHEMA`, and `keep`, the types of kept columns.

    The first `written` files are already stored in the `num_parts` manifest parts of the output; `written_cuts` are the
    cuts of these parts if `num_shards` is more than 1.
    """

    root: str
    files: pa.Table
    keep: pa.Schema
    written: int = 0
    num_parts: int = 0
    num_shards: int = 1
    written_cuts: tuple[Cut, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of files in the source's folders that are not listed, by suffix."""

    @property
    def num_files(self) -> int:
        return int(self.files.num_rows)

    @property
    def num_bytes(self) -> int:
        return int(pc.sum(self.files["size_bytes"]).as_py() or 0)

    @property
    def num_samples(self) -> int | None:
        """Total number of samples; None if some file's count is unknown."""
        counts = self.files["num_samples"]
        return None if counts.null_count else int(pc.sum(counts).as_py() or 0)

    @property
    def counts(self) -> Ints:
        """The number of samples of every file; `UNKNOWN` if it is known only after reading. May be a read-only view."""
        counts = self.files["num_samples"]
        counts = counts.fill_null(UNKNOWN) if counts.null_count else counts
        return np.asarray(counts.combine_chunks().to_numpy(zero_copy_only=False), np.int64)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The cut of every part into shards, including the part that is not written yet; empty without shards."""
        if self.num_shards == 1 or self.written == self.num_files:
            return self.written_cuts
        sizes = self.files["size_bytes"].to_numpy()[self.written :]
        return (*self.written_cuts, cut(self.counts[self.written :], sizes, self.written, self.num_shards))

    def entry(self, file: int, start: int) -> Entry:
        """Return where the last row group at or before row `start` begins; row 0 for kinds that need no such index."""
        rows, sizes, lines = (self.files[field.name][file].values.to_numpy() for field in list(FACTS)[1:])
        if not len(lines):
            return Entry()
        number = int(np.searchsorted(np.cumsum(rows), start, side="right"))
        row, offset, line = (int(values[:number].sum()) for values in (rows, sizes, lines))
        return Entry(row, offset, line + 1)

    def write(self, output: OutputDir) -> None:
        """Atomically create the next part from the files that are in no part yet; parts never change.

        Raises:
            FileExistsError: another attempt has created this part with other files.
        """
        if self.written == self.num_files:
            return
        metadata = {
            SCHEMA_VERSION_KEY: str(SCHEMA_VERSION).encode(),
            ROOT_KEY: access.shown(self.root).encode(),
            KEEP_KEY: self.keep.serialize().to_pybytes().hex().encode(),
            **({CUT_KEY: self.cuts[-1].to_json()} if self.num_shards > 1 else {}),
        }
        sink = pa.BufferOutputStream()
        pq.write_table(self.files.slice(self.written).replace_schema_metadata(metadata), sink, compression="zstd")
        output.create_recorded(part_name(self.num_parts), sink.getvalue())


def part_name(number: int) -> str:
    return f"{PARTS}/part-{number:05d}.parquet"
