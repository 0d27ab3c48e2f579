"""Writes images as loose files, or as folders that `datasets.load_dataset("imagefolder", …)` opens.

files         NAME.png NAME.txt               NAME is the row's id, percent-encoded
imagefolder   train/part-000003/NAME.png      a folder per published file
              train/part-000003/metadata.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from configs.output import FileExportConfig, ImageFolderExportConfig
from pipeline.exports.image_tars import stem_of
from pipeline.exports.ledger import ExportLedger, ExportPart, PartOutcome, Refusal
from pipeline.exports.media import IMAGE_ROW_S, ExportSample, SampleReader
from pipeline.exports.own_folder import OwnFolder, target_tree
from pipeline.exports.rows import as_json, in_threads, json_bytes, parts_of, reason
from pipeline.output.recorded_job import RecordedJob
from pipeline.storage.tree import Tree

SPLIT = "train"
METADATA = "metadata.jsonl"
MAX_NAME_BYTES = 200
"""Maximum length of a file name without its suffix; file systems have 255."""


@dataclass(frozen=True)
class ImageFiles(OwnFolder):
    """The export of image files: loose ones, each with a file of `text`, or folders with metadata (`in_folders`)."""

    reader: SampleReader
    tree: Tree
    rows_per_file: int
    text: str = "none"
    in_folders: bool = False

    @classmethod
    def of(cls, job: RecordedJob[Any], config: FileExportConfig | ImageFolderExportConfig, dotted: str) -> ImageFiles:
        """Check the job; ConfigError as `SampleReader.of`."""
        reader = SampleReader.of(job, config.columns, dotted)
        tree, num_rows = target_tree(job, config.path, f"{dotted}.path"), job.config.sink.rows_per_file
        if isinstance(config, ImageFolderExportConfig):
            return cls(reader, tree, num_rows, in_folders=True)
        return cls(reader, tree, num_rows, config.text)

    def parts(self) -> list[ExportPart]:
        """Return a part for each published file of `data/`."""
        return parts_of(self.reader.output, IMAGE_ROW_S, self.rows_per_file)

    def export(self, name: str) -> PartOutcome:
        """Write the files of a published file; rows without an image, or with too long a name, are refused."""
        folder = f"{SPLIT}/{stem_of(name)}/" if self.in_folders else ""
        refused: list[Refusal] = []
        lines: list[bytes] = []
        for outcome in in_threads(lambda sample: self._write(folder, sample), self.reader.read(name, refused)):
            if isinstance(outcome, Refusal):
                refused.append(outcome)
            else:
                lines.append(outcome)
        if self.in_folders:
            if lines:
                self.tree.replace(f"{folder}{METADATA}", b"".join(lines))
            else:
                self.tree.remove(f"{folder}{METADATA}")
        return PartOutcome(len(lines), 0, tuple(refused))

    def finish(self, ledger: ExportLedger) -> None:
        """Files have no common file."""

    def _write(self, folder: str, sample: ExportSample) -> bytes | Refusal:
        """Write the files of a row and return its line of metadata."""
        row = sample.row
        if sample.image is None:
            return Refusal(row["sample_id"], row["source"], "export_refused", "the row has no image")
        stem = quote(row["sample_id"], safe="#")
        if len(stem) > MAX_NAME_BYTES:
            message = f"its id is longer than {MAX_NAME_BYTES} bytes, the limit of file names"
            return Refusal(row["sample_id"], row["source"], "export_refused", message)
        file_name = f"{stem}.{sample.suffix}"
        facts = {"file_name": file_name, "caption": sample.text, **as_json(row, self.reader.columns)}
        try:
            self.tree.replace(f"{folder}{file_name}", sample.image)
            if self.text == "txt":
                self.tree.replace(f"{stem}.txt", f"{sample.text}\n".encode("utf-8", "backslashreplace"))
            elif self.text == "json":
                self.tree.replace(f"{stem}.json", json_bytes(facts) + b"\n")
        except OSError as error:
            return Refusal(row["sample_id"], row["source"], "export_failed", reason(error))
        return json_bytes(facts) + b"\n"
