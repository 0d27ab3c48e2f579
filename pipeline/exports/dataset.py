"""Writes a folder that `datasets.load_dataset` opens: a Parquet file per published file, and a dataset card.

    README.md                           the card; a card that was edited is left as it is
    data/train-part-000003.parquet      the rows of `data/part-000003.parquet`

Images are read again from the source. A published file that was emptied later has no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from configs.load import ConfigError
from configs.output import CAPTION_COLUMN, DatasetExportConfig
from configs.source import SourceConfig
from pipeline.exports import card
from pipeline.exports.ledger import ExportLedger, ExportPart, PartOutcome, Refusal
from pipeline.exports.own_folder import OwnFolder, target_tree
from pipeline.exports.rows import check_columns, hash_of, manifest_of, parts_of, read_rows
from pipeline.formats.uris import Fetcher
from pipeline.manifest.datasource import SpanDatasource
from pipeline.manifest.done_bitmap import DoneBitmap, PathIndex
from pipeline.manifest.manifest import Manifest
from pipeline.output.accounts import locate
from pipeline.output.recorded_job import RecordedJob
from pipeline.rows.schemas import HUGGING_FACE_KEY, IMAGE, IMAGE_ROWS_PER_GROUP, RowError
from pipeline.storage import access
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.parquet_files import DamagedParquet, open_parquet
from pipeline.storage.tree import Tree

FOLDER = "data"
ROW_S, IMAGE_ROW_S = 2e-6, 5e-3
DEFAULT_COLUMNS = ("sample_id", "source", CAPTION_COLUMN)


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
    def of(cls, job: RecordedJob, config: DatasetExportConfig, dotted: str) -> Dataset:
        """Check the job; ConfigError for unknown columns, or a source that changed and whose images are needed."""
        columns = config.columns or tuple(dict.fromkeys((*DEFAULT_COLUMNS, *job.manifest.keep.names)))
        check_columns(job, columns, f"{dotted}.columns")
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
                writer.write_table(rows.cast(schema), IMAGE_ROWS_PER_GROUP if self.root else None)
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
        if not self.root:
            return schema
        image_feature = {"_type": "Image"}
        name, kind, feature = "image", IMAGE, dict[str, Any](image_feature)
        if self.config.images == "all":
            name, kind, feature = "images", pa.list_(IMAGE), {"_type": "List", "feature": image_feature}
        metadata = json.dumps({"info": {"features": {name: feature}}})
        return schema.append(pa.field(name, kind)).with_metadata({HUGGING_FACE_KEY: metadata})

    def _with_images(self, table: pa.Table, refused: list[Refusal]) -> Iterator[pa.Table]:
        """Yield the rows with their images, a span of the source at a time; rows without their media are refused."""
        manifest = manifest_of(self.output, self.listing)
        [located] = locate([table], PathIndex(manifest.files["path"]))
        ordinals, positions = np.unique(located.files, return_inverse=True)
        if ordinals[0] < 0:
            raise RuntimeError("a row's source is no listed file of the job")
        files = manifest.files.take(pa.array(ordinals)).combine_chunks()
        some = Manifest(self.root, files, pa.schema([]))
        unread = DoneBitmap.all_but(some.counts, positions, located.rows)
        reader = SpanDatasource(self.source, some, done=unread)
        wanted: dict[tuple[str, int], list[int]] = {}
        for index, key in enumerate(zip(table["source"].to_pylist(), table["row_index"].to_pylist(), strict=True)):
            wanted.setdefault(key, []).append(index)
        for span in range(reader.num_spans):
            read = reader.read(span, note=False)
            row_indices: list[int] = []
            images: list[Any] = []
            for index in range(read.num_rows):
                indices = wanted.pop((read["source"][index].as_py(), read["row_index"][index].as_py()), [])
                if not indices:
                    continue
                try:
                    if code := read["error_type"][index].as_py():
                        raise RowError(code, read["error_message"][index].as_py())
                    cell = _encoded(read["images"][index].as_py(), self.source, self.root)
                except RowError as error:
                    refused += [_refusal(table, row, f"{error.code}: {error.message}") for row in indices]
                    continue
                row_indices += indices
                images += [cell if self.config.images == "all" else next(iter(cell), None)] * len(indices)
            if row_indices:
                rows = table.select(self.columns).take(pa.array(row_indices))
                kind = pa.list_(IMAGE) if self.config.images == "all" else IMAGE
                yield rows.append_column("images" if self.config.images == "all" else "image", pa.array(images, kind))
        lost = [row for indices in wanted.values() for row in indices]
        refused += [_refusal(table, row, "its source has no such row any more") for row in lost]


def target_name(name: str) -> str:
    """Return the path of the exported file with the rows of a published file."""
    return f"{FOLDER}/train-{name.rpartition('/')[2]}"


def _refusal(table: pa.Table, row: int, message: str) -> Refusal:
    return Refusal(table["sample_id"][row].as_py(), table["source"][row].as_py(), "export_failed", message)


def _encoded(cell: Sequence[dict[str, Any]], source: SourceConfig, root: str) -> list[dict[str, Any]]:
    """Return a row's images as encoded bytes; RowError for the first that cannot be fetched."""
    fetched = Fetcher(source, root).fetch([image["uri"] for image in cell if image["bytes"] is None])
    encoded = []
    for image in cell:
        data = fetched[image["uri"]] if image["bytes"] is None else image["bytes"]
        if isinstance(data, RowError):
            raise data
        encoded.append({"bytes": data, "path": None})
    return encoded
