"""Writing: result tables into `data/` and `errors/`, each file whole or not there at all.

File names come from the job, the attempt and the write task, so a retried write replaces its own files and two attempts
never meet. Knows rows and the layout; nothing of what made the rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from ray.data import Datasink
from ray.data.datasource.datasink import WriteResult

from configs.schema import Sink
from pipeline import rows
from pipeline.layout import DATA, ERRORS, OutputDir


@dataclass(frozen=True)
class Written:
    """What one write task did: paths of its files below the output, and rows of both kinds."""

    files: tuple[str, ...]
    num_rows: int
    num_error_rows: int


class ParquetSink(Datasink[Written]):  # type: ignore[misc]
    """Writes RESULT tables: rows without an `error_type` into `data/`, the others into `errors/`.

    One file holds at most `sink.rows_per_file` rows of one write task. After the job `written` tells what was written.
    `schema` is that of the tables, by default a caption job's with the columns of `keep`.
    """

    def __init__(
        self,
        output: OutputDir,
        sink: Sink,
        job_id: str,
        attempt: int,
        keep: Iterable[pa.Field] = (),
        schema: pa.Schema | None = None,
        rows_per_group: int | None = None,
    ) -> None:
        kept = list(keep)
        self._output = output
        self._sink = sink
        self._stem = f"{file_stem(job_id)}-a{attempt:04d}"
        self._schema = rows.result_schema(kept) if schema is None else schema
        self._kept = {field.name for field in kept}
        self._rows_per_group = rows_per_group
        self.written: list[Written] = []

    def get_name(self) -> str:
        """The operator's name in progress bars."""
        return "WriteParquet"

    @property
    def min_rows_per_write(self) -> int:
        """Rows that Ray gathers for one write task: nine tenths of a file, so that its last batch still fits."""
        return max(1, self._sink.rows_per_file * 9 // 10)

    def on_write_start(self, schema: pa.Schema | None = None) -> None:
        """Make the folders."""
        self._output.make_folders()

    def write(self, blocks: Iterable[pa.Table], ctx: Any) -> Written:
        """Write one task's blocks; writing them again replaces the files of the first time.

        Raises:
            ValueError: a block does not have the result schema.
            OSError: a file could not be put; none of it is visible.
        """
        return self.write_task(blocks, int(ctx.task_idx))

    def write_task(self, blocks: Iterable[pa.Table], task: int) -> Written:
        """`write`, for the task with this number."""
        table = pa.concat_tables([self._schema.empty_table(), *(self._checked(block) for block in blocks)])
        failed = pc.not_equal(table["error_type"], "")
        files: list[str] = []
        for folder, part in ((DATA, table.filter(pc.invert(failed))), (ERRORS, table.filter(failed))):
            for number, rows_of_file in enumerate(_parts(part, self._sink.rows_per_file)):
                relative = f"{folder}/{self._stem}-{task:06d}-{number:03d}.parquet"
                self._output.write_bytes(relative, self._serialise(rows_of_file))
                files.append(relative)
        return Written(tuple(files), table.num_rows, int(pc.sum(failed).as_py() or 0))

    def on_write_complete(self, write_result: WriteResult[Written]) -> None:
        """Remember what was written; a job without one good row still leaves a readable, empty `data/`."""
        self.written = [returned for returned in write_result.write_returns if returned is not None]
        if not any(name.startswith(DATA) for written in self.written for name in written.files):
            relative = f"{DATA}/{self._stem}-empty.parquet"
            self._output.write_bytes(relative, self._serialise(self._schema.empty_table()))

    def _checked(self, block: pa.Table) -> pa.Table:
        """The block with exactly the result schema; its column types must be right already."""
        if block.schema.names != self._schema.names:
            raise ValueError(f"a result block has the columns {block.schema.names}, not {self._schema.names}")
        table = block.cast(self._schema)
        for field in self._schema:
            if field.type == pa.string() and field.name not in self._kept and table[field.name].null_count:
                raise ValueError(f"the column {field.name!r} of a result block holds nulls")
        return table

    def _serialise(self, table: pa.Table) -> pa.Buffer:
        """The table as a whole Parquet file in memory, read back before it is let out."""
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression=self._sink.compression, row_group_size=self._rows_per_group)
        buffer = sink.getvalue()
        metadata = pq.read_metadata(pa.BufferReader(buffer))
        if metadata.num_rows != table.num_rows:
            raise OSError(f"a Parquet file of {table.num_rows} rows reads back with {metadata.num_rows}")
        return buffer


def _parts(table: pa.Table, max_rows: int) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, max_rows):
        yield table.slice(start, max_rows)


def file_stem(job_id: str) -> str:
    """The job's id as the beginning of a file name: visible, without separators, at most 80 characters."""
    return re.sub(r"[^A-Za-z0-9.\-]+", "-", job_id).strip("-.")[:80] or "job"
