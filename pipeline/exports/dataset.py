"""Writes a folder that `datasets.load_dataset` opens: a Parquet file per published file, and a dataset card.

    README.md                           the card; a card that was edited is left as it is
    data/train-part-000003.parquet      the rows of `data/part-000003.parquet`

Images are read again from the source. A published file that was emptied later has no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.load import ConfigError
from configs.output import CAPTION_COLUMN, DatasetExportConfig
from configs.source import SourceConfig
from pipeline.exports import card
from pipeline.exports.ledger import ExportLedger, ExportPart, PartOutcome, Refusal
from pipeline.exports.media import IMAGE_ROW_S, PROMPT_COLUMN, SourceImages
from pipeline.exports.own_folder import OwnFolder, target_tree
from pipeline.exports.rows import check_columns, hash_of, parts_of, read_rows
from pipeline.output.recorded_job import RecordedJob
from pipeline.rows.schemas import HUGGING_FACE_KEY, IMAGE, IMAGE_ROWS_PER_GROUP
from pipeline.storage import access
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.parquet_files import DamagedParquet, open_parquet
from pipeline.storage.tree import Tree

FOLDER = "data"
ROW_S = 2e-6
DEFAULT_COLUMNS = ("sample_id", "source", CAPTION_COLUMN)
IMAGE_COLUMNS = ("sample_id", PROMPT_COLUMN, "image", "seed", "temperature", "top_k", "top_p", "guidance_scale")


@dataclass(frozen=True)
class Dataset(OwnFolder):
    """The export of a dataset folder; `root` is the source's, or empty if no images are read."""

    output: OutputDir
    tree: Tree
    config: DatasetExportConfig
    columns: tuple[str, ...]
    source: SourceConfig
    root: str
    listing: str
    rows_per_file: int
    facts: card.Facts

    @classmethod
    def of(cls, job: RecordedJob[Any], config: DatasetExportConfig, dotted: str) -> Dataset:
        """Check the job; ConfigError for unknown columns, or a source that changed and whose images are needed."""
        default = IMAGE_COLUMNS if job.makes_images else DEFAULT_COLUMNS
        columns = config.columns or tuple(dict.fromkeys((*default, *job.manifest.keep.names)))
        check_columns(job, columns, f"{dotted}.columns")
        if job.makes_images and config.images != "none":
            raise ConfigError(f"{dotted}.images: the job makes images, and its source holds prompts; leave it out")
        for name in {"first": ("image",), "all": ("images",)}.get(config.images, ()):
            if name in columns:
                raise ConfigError(f"{dotted}.images: the column {name!r} is one of the output already; leave one out")
        source, manifest = job.config.source, job.manifest
        root = "" if config.images == "none" else job.reopened(manifest).root
        tree = target_tree(job, config.path, f"{dotted}.path")
        facts = card.Facts.of(job, config, columns)
        return cls(
            job.output, tree, config, columns, source, root, hash_of(manifest), job.config.sink.rows_per_file, facts
        )

    def parts(self) -> list[ExportPart]:
        return parts_of(self.output, IMAGE_ROW_S if self.root else ROW_S, self.rows_per_file)

    def export(self, name: str) -> PartOutcome:
        """Write the rows of a published file, with their images if asked."""
        relative = target_name(name)
        table = read_rows(self.output, name, self.columns)
        if not table.num_rows:
            self.tree.remove(relative)
            return PartOutcome()
        refused: list[Refusal] = []
        num_rows = 0
        schema = self._schema(table.schema)
        with self.tree.writing(relative) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for rows in self._with_images(table, refused) if self.root else (table.select(self.columns),):
                has_images = bool(self.root) or "image" in schema.names
                writer.write_table(rows.cast(schema), IMAGE_ROWS_PER_GROUP if has_images else None)
                num_rows += rows.num_rows
        return PartOutcome(num_rows, 0, tuple(refused))

    def finish(self, ledger: ExportLedger) -> None:
        """Write the card; RuntimeError if a written file is missing or damaged, which the next run writes again.

        Other files in the folder are left as they are, and not counted.
        """
        num_rows = 0
        for part in self.parts():
            relative = target_name(part.name)
            try:
                with open_parquet(self.tree.filesystem, self.tree.path(relative)) as parquet:
                    num_rows += parquet.metadata.num_rows
                continue
            except FileNotFoundError:
                if not ledger.has_written(part.key):
                    continue
                reason = "it is gone"
            except (DamagedParquet, OSError) as error:
                reason = access.reason_of(error)
            ledger.forget(part.key)
            raise RuntimeError(
                f"{self.tree.dotted}: {self.tree.shown(relative)} is damaged: {reason}; start the export again, which "
                "writes it again (a file of yours needs another name)"
            )
        card.write(self.tree, ledger, replace(self.facts, num_rows=num_rows))

    def _schema(self, read: pa.Schema) -> pa.Schema:
        schema = pa.schema([read.field(name) for name in self.columns])
        image_feature = {"_type": "Image"}
        if not self.root:
            if "image" not in self.columns or schema.field("image").type != IMAGE:
                return schema
            made = json.dumps({"info": {"features": {"image": image_feature}}})
            return schema.with_metadata({HUGGING_FACE_KEY: made})
        name, kind, feature = "image", IMAGE, dict[str, Any](image_feature)
        if self.config.images == "all":
            name, kind, feature = "images", pa.list_(IMAGE), {"_type": "List", "feature": image_feature}
        metadata = json.dumps({"info": {"features": {name: feature}}})
        return schema.append(pa.field(name, kind)).with_metadata({HUGGING_FACE_KEY: metadata})

    def _with_images(self, table: pa.Table, refused: list[Refusal]) -> Iterator[pa.Table]:
        """Yield the rows with their images, a span of the source at a time; rows without their media are refused."""
        is_all = self.config.images == "all"
        read = SourceImages(self.output, self.source, self.root, self.listing)
        for indices, cells in read.of(table, refused):
            rows = table.select(self.columns).take(pa.array(indices))
            images: list[Any] = cells if is_all else [next(iter(cell), None) for cell in cells]
            name, kind = ("images", pa.list_(IMAGE)) if is_all else ("image", IMAGE)
            yield rows.append_column(name, pa.array(images, kind))


def target_name(name: str) -> str:
    """Return the path of the exported file with the rows of a published file."""
    return f"{FOLDER}/train-{name.rpartition('/')[2]}"
