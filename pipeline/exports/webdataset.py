"""Writes new tar shards with the names and members of the source's, and the caption as one more member of each sample.

A tar is exported when all of its samples have a row. It holds the samples with a result, and its record lists the
others. Its bytes are a function of the source's tar and of the captions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.load import ConfigError
from configs.output import CAPTION_COLUMN, WebDatasetExportConfig
from pipeline.exports import archives
from pipeline.exports.ledger import ExportLedger, ExportPart, PartOutcome, Refusal
from pipeline.exports.own_folder import OwnFolder, target_tree
from pipeline.exports.rows import as_json, check_columns, json_bytes, parts_of_sources, read_rows, rows_of
from pipeline.output.recorded_job import RecordedJob
from pipeline.storage import access
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.tree import Tree

BYTE_S = 2e-8


@dataclass(frozen=True)
class WebDataset(OwnFolder):
    """The export of tars; `root` is the root of the source's."""

    output: OutputDir
    tree: Tree
    config: WebDatasetExportConfig
    root: str

    @classmethod
    def of(cls, job: RecordedJob[Any], config: WebDatasetExportConfig, dotted: str) -> WebDataset:
        """Check the job; ConfigError for another source, several rows per sample, or tars that changed."""
        if job.config.source.kind != "webdataset":
            raise ConfigError(
                f"{dotted}: captions are added to the tars of source.kind webdataset, and source.kind is "
                f"{job.config.source.kind!r}; exports of kind dataset take all sources"
            )
        if job.multiplies_rows:
            raise ConfigError(f"{dotted}: a sample of the job has several rows, and one caption is added to a sample")
        if config.extension.endswith("json"):
            check_columns(job, config.columns, f"{dotted}.columns")
        root = job.reopened(job.manifest).root
        return cls(job.output, target_tree(job, config.path, f"{dotted}.path"), config, root)

    def parts(self) -> list[ExportPart]:
        """Return a part for each tar whose samples all have rows."""
        return parts_of_sources(self.output, BYTE_S)

    def export(self, item: tuple[str, Sequence[str]]) -> PartOutcome:
        """Write the tar of this path; the second value names the published files with its rows."""
        path, names = item
        columns = [CAPTION_COLUMN, "error_type", "error_message"]
        columns += self.config.columns if self.config.extension.endswith("json") else ()
        tables = [read_rows(self.output, name, columns) for name in names]
        rows = rows_of(pa.concat_tables([table.filter(pc.equal(table["source"], path)) for table in tables]))
        results = {row["row_index"]: row for row in rows if not row["error_type"]}
        failed = {row["row_index"]: row for row in rows if row["row_index"] not in results}
        captions = {index: self._member(row) for index, row in results.items()}
        filesystem, root = access.open_url(self.root, "source.path")
        with (
            access.open_file(filesystem, access.join(root, path)) as source,
            self.tree.writing(path) as sink,
        ):
            copied = archives.copy_with(
                source, sink, captions, self.config.extension, self.config.existing == "overwrite"
            )
        lost = results.keys() - copied.written - copied.existing - copied.outside
        return PartOutcome(
            len(copied.written),
            len(copied.existing),
            (
                *(_refused(results[key], "export_failed", "the archive has no such sample") for key in sorted(lost)),
                *(
                    _refused(results[key], "export_refused", "a member's name leaves the archive's root")
                    for key in sorted(copied.outside)
                ),
            ),
            tuple(_refused(row, row["error_type"], row["error_message"]) for _, row in sorted(failed.items())),
        )

    def finish(self, ledger: ExportLedger) -> None:
        """Tars have no common file."""

    def _member(self, row: dict[str, Any]) -> bytes:
        if not self.config.extension.endswith("json"):
            return str(row[CAPTION_COLUMN]).encode()
        return json_bytes(as_json(row, self.config.columns))


def _refused(row: dict[str, Any], code: str, message: str) -> Refusal:
    return Refusal(row["sample_id"], row["source"], code, message)
