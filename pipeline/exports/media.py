"""Reads rows of published files with their images, for exports: images that the job made, or images of the source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from configs.load import ConfigError
from configs.output import CAPTION_COLUMN
from configs.source import SourceConfig
from pipeline.exports.ledger import Refusal
from pipeline.exports.rows import check_columns, hash_of, manifest_of, output_columns, read_rows, rows_of
from pipeline.formats.uris import Fetcher
from pipeline.manifest.datasource import SpanDatasource
from pipeline.manifest.done_bitmap import DoneBitmap, PathIndex
from pipeline.manifest.manifest import Manifest
from pipeline.output.accounts import locate
from pipeline.output.recorded_job import RecordedJob
from pipeline.rows.schemas import RowError
from pipeline.storage.output_dir import OutputDir

ROWS_AT_ONCE = 64
"""Rows whose images are in memory as Python objects at the same time."""
IMAGE_ROW_S = 5e-3
"""Assumed seconds of one core for a row with an image."""
PROMPT_COLUMN = "prompt"
TEXT_FACTS = ("sample_id", "source", "row_index", "status", "method", "verify_mode", "mean_logprob", "seed")
IMAGE_FACTS = (
    *("sample_id", "prompt_id", "replica", "label", "width_px", "height_px"),
    *("seed", "temperature", "top_k", "top_p", "guidance_scale"),
)
"""Columns of a sample by default, those of the source that were kept are added."""
_SUFFIXES = ((b"\x89PNG\r\n", "png"), (b"\xff\xd8\xff", "jpg"), (b"GIF8", "gif"), (b"BM", "bmp"))
_TIFF = (b"II*\0", b"MM\0*")


@dataclass(frozen=True)
class ExportSample:
    """A row of a published file by its index there: its columns, its text, and its first image with a suffix; no bytes
    for rows without an image."""

    index: int
    row: dict[str, Any]
    text: str
    image: bytes | None
    suffix: str = ""


@dataclass(frozen=True)
class SampleReader:
    """Reads the samples of published files; `root` is that of the source, or empty if no images are read again."""

    output: OutputDir
    columns: tuple[str, ...]
    makes_images: bool
    source: SourceConfig
    root: str
    listing: str

    @classmethod
    def of(cls, job: RecordedJob[Any], columns: Sequence[str], dotted: str) -> SampleReader:
        """Check the job; ConfigError for unknown columns, an output without images, or a source that changed."""
        known = output_columns(job)
        facts = (*(IMAGE_FACTS if job.makes_images else TEXT_FACTS), *job.manifest.keep.names)
        chosen = tuple(columns) or tuple(name for name in facts if not known or name in known)
        check_columns(job, chosen, f"{dotted}.columns")
        if job.makes_images:
            if not job.config.sink.images:
                raise ConfigError(f"{dotted}: the job has sink.images: false, so its output holds no images")
            if "image" in chosen:
                raise ConfigError(f"{dotted}.columns: 'image' is exported as a file; leave it out")
        manifest = job.manifest
        root = "" if job.makes_images or not job.config.reads_images else job.reopened(manifest).root
        return cls(job.output, chosen, job.makes_images, job.config.source, root, hash_of(manifest))

    @property
    def text_column(self) -> str:
        return PROMPT_COLUMN if self.makes_images else CAPTION_COLUMN

    def read(self, name: str, refused: list[Refusal]) -> Iterator[ExportSample]:
        """Yield the samples of a published file of `data/`, and append rows whose image cannot be read to `refused`.
        Rows of a source without images have none."""
        own = ("image",) if self.makes_images else ()
        table = read_rows(self.output, name, (*self.columns, self.text_column, *own))
        if self.makes_images or not self.root:
            yield from self._rows(table, np.arange(table.num_rows).tolist(), None)
            return
        read = SourceImages(self.output, self.source, self.root, self.listing)
        for indices, images in read.of(table, refused):
            yield from self._rows(table, indices, [next(iter(cell), None) for cell in images])

    def _rows(
        self, table: pa.Table, indices: Sequence[int], images: Sequence[dict[str, Any] | None] | None
    ) -> Iterator[ExportSample]:
        for start in range(0, len(indices), ROWS_AT_ONCE):
            some = indices[start : start + ROWS_AT_ONCE]
            for offset, row in enumerate(rows_of(table.take(pa.array(some, pa.int64())))):
                image = row.pop("image", None) if images is None else images[start + offset]
                data = None if image is None else image["bytes"]
                text = str(row[self.text_column] or "")
                yield ExportSample(some[offset], row, text, data, "" if data is None else suffix_of(data))


def suffix_of(data: bytes) -> str:
    """Return the usual suffix of an encoded image, by its first bytes; `img` for unknown formats."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[:4] in _TIFF:
        return "tif"
    return next((suffix for head, suffix in _SUFFIXES if data.startswith(head)), "img")


@dataclass(frozen=True)
class SourceImages:
    """Reads the images of results from the source again; `listing` is the hash of the manifest's paths."""

    output: OutputDir
    source: SourceConfig
    root: str
    listing: str

    def of(self, table: pa.Table, refused: list[Refusal]) -> Iterator[tuple[list[int], list[list[dict[str, Any]]]]]:
        """Yield indices of results and the images of each, a span of the source at a time; rows without their media
        are appended to `refused`."""
        if not table.num_rows:
            return
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
            images: list[list[dict[str, Any]]] = []
            for index in range(read.num_rows):
                indices = wanted.pop((read["source"][index].as_py(), read["row_index"][index].as_py()), [])
                if not indices:
                    continue
                try:
                    if code := read["error_type"][index].as_py():
                        raise RowError(code, read["error_message"][index].as_py())
                    cell = self._encoded(read["images"][index].as_py())
                except RowError as error:
                    refused += [_refusal(table, row, f"{error.code}: {error.message}") for row in indices]
                    continue
                row_indices += indices
                images += [cell] * len(indices)
            if row_indices:
                yield row_indices, images
        lost = [row for indices in wanted.values() for row in indices]
        refused += [_refusal(table, row, "its source has no such row any more") for row in lost]

    def _encoded(self, cell: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a row's images as encoded bytes; RowError for the first that cannot be fetched."""
        fetched = Fetcher(self.source, self.root).fetch([image["uri"] for image in cell if image["bytes"] is None])
        encoded = []
        for image in cell:
            data = fetched[image["uri"]] if image["bytes"] is None else image["bytes"]
            if isinstance(data, RowError):
                raise data
            encoded.append({"bytes": data, "path": None})
        return encoded


def _refusal(table: pa.Table, row: int, message: str) -> Refusal:
    return Refusal(table["sample_id"][row].as_py(), table["source"][row].as_py(), "export_failed", message)
