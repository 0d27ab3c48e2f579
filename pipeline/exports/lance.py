"""Merges captions into a Lance dataset as one column, by the id of rows; the library is the package `pylance`.

All results are merged in one commit, which keeps the order of rows and their other columns. If there are more results
later, the column is dropped and merged again, in two commits; older versions of the dataset keep it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.load import ConfigError
from configs.output import CAPTION_COLUMN, LanceExportConfig
from pipeline.exports.ledger import ExportLedger, ExportPart, PartOutcome, Refusal, published, state_of
from pipeline.exports.rows import read_rows
from pipeline.formats import lance
from pipeline.output.recorded_job import RecordedJob
from pipeline.storage import access
from pipeline.storage.folders import FolderId
from pipeline.storage.output_dir import DATA, OutputDir

MAX_ROWS = 20_000_000
"""Maximum number of rows of a merge: their ids and captions are in memory."""
MAX_REFUSED = 10_000
"""Maximum number of ids without a row that are listed."""
FILE_S = 0.05


@dataclass(frozen=True)
class LanceColumn:
    """The export of a column; `id_column` is the dataset's column that equals `sample_id`."""

    output: OutputDir
    url: str
    dotted: str
    config: LanceExportConfig
    id_column: str
    folder_id: FolderId | None = None
    """The identity of a local dataset."""

    @classmethod
    def of(cls, job: RecordedJob[Any], config: LanceExportConfig, dotted: str) -> LanceColumn:
        """Check the job; ConfigError without ids of rows, for several rows per sample, or without the library."""
        name = job.config.source.id_column
        if name is None:
            raise ConfigError(f"{dotted}: captions are merged by id, and the job has no source.id_column")
        if job.multiplies_rows:
            raise ConfigError(
                f"{dotted}: a sample of the job has several rows, and a row of a dataset gets one caption"
            )
        filesystem, path = access.open_url(config.path, f"{dotted}.path")
        folder_id = FolderId.of(path) if access.is_local(filesystem) else None
        url = access.unstripped(filesystem, path) if folder_id is None else folder_id.path
        column = cls(job.output, url, dotted, config, name, folder_id)
        if name not in column._open().schema.names:
            raise ConfigError(f"{dotted}.path: {access.shown(config.path)} has no column {name!r} (source.id_column)")
        return column

    def _open(self) -> Any:
        library = lance.library(f"{self.dotted}.kind")
        if self.folder_id is not None and not ((now := FolderId.of(self.url)) and now.is_same(self.folder_id)):
            raise ConfigError(f"{self.dotted}.path: {access.shown(self.url)} was replaced while it was exported")
        try:
            return library.dataset(self.url)
        except Exception as error:  # the library raises errors of no common class
            reason = access.reason_of(error)
            raise ConfigError(f"{self.dotted}.path: {access.shown(self.url)} cannot be opened: {reason}") from None

    def check(self, ledger: ExportLedger) -> None:
        """Raise ConfigError if the dataset is another one than before, or has the column, and it is not of this export
        and not to be replaced."""
        ledger.refuse_moved(self.folder_id, (), f"{self.dotted}.path: {access.shown(self.config.path)}")
        if self.config.column == self.id_column:
            raise ConfigError(f"{self.dotted}.column: {self.config.column!r} is the column of ids")
        has_column = self.config.column in self._open().schema.names
        if has_column and self.config.existing == "refuse" and not ledger.is_claimed():
            raise ConfigError(
                f"{self.dotted}.column: the dataset has a column {self.config.column!r}; choose another name, or set "
                "existing: overwrite, which replaces it"
            )

    def parts(self) -> list[ExportPart]:
        """Return one part: the whole column."""
        states = published(self.output, DATA)
        names = sorted(states)
        state = state_of([text for name in names for text in (name, states[name])])
        return [ExportPart("column", state, names, FILE_S, tuple(names))] if names else []

    def export(self, names: list[str]) -> PartOutcome:
        """Merge the results in these published files."""
        tables: list[pa.Table] = []
        for name in names:
            tables.append(read_rows(self.output, name, (CAPTION_COLUMN,)).select(["sample_id", CAPTION_COLUMN]))
            if (num_rows := sum(table.num_rows for table in tables)) > MAX_ROWS:
                raise ConfigError(
                    f"{self.dotted}: the output has more than {MAX_ROWS:,} rows ({num_rows:,} so far), which are not "
                    "merged at once; join data/ with the dataset in a query engine"
                )
        dataset = self._open()
        kind = dataset.schema.field(self.id_column).type
        table = pa.concat_tables(tables)
        try:
            ids = table["sample_id"].cast(kind)
        except pa.ArrowException as error:
            raise ConfigError(
                f"{self.dotted}.path: ids of the output are no values of the column {self.id_column!r} ({kind}): "
                f"{access.reason_of(error)}"
            ) from None
        try:
            return self._merge(dataset, table, ids)
        except Exception as error:  # the library raises errors of no common class
            url, reason = access.shown(self.url), access.reason_of(error)
            raise RuntimeError(f"{self.dotted}.path: {url} cannot be read or written: {reason}") from None

    def _merge(self, dataset: Any, table: pa.Table, ids: pa.ChunkedArray) -> PartOutcome:
        matched = pa.chunked_array([pa.array([False]).take(pa.array([0] * len(ids), pa.int64()))])
        for batch in dataset.scanner(columns=[self.id_column]).to_batches():
            matched = pc.or_(matched, pc.is_in(ids, value_set=batch.column(0)))
        lost = table["sample_id"].filter(pc.invert(matched)).slice(0, MAX_REFUSED).to_pylist()
        refused = [Refusal(sample_id, "", "export_failed", "the dataset has no row with this id") for sample_id in lost]
        if self.config.column in dataset.schema.names:
            dataset.drop_columns([self.config.column])
        columns = pa.table({self.id_column: ids, self.config.column: table[CAPTION_COLUMN]}).filter(matched)
        dataset.merge(columns.combine_chunks(), self.id_column)
        return PartOutcome(columns.num_rows, 0, tuple(refused))

    def finish(self, ledger: ExportLedger) -> None:
        """The column is whole."""
