"""Writes tars in the layout of img2dataset: one per published file, with three members per row of one key.

    part-000003.tar
        00000300000017.png     the image: that of the source, or the one that the job made
        00000300000017.txt     the caption, or the prompt
        00000300000017.json    key, caption and columns of the row

Keys are the number of the published file (6 digits) and the index of the row (8 digits); they contain no dot. Bytes are
a function of the results and images.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import dataclass
from typing import Any, BinaryIO

from configs.output import TarExportConfig
from pipeline.exports.ledger import ExportLedger, ExportPart, PartOutcome, Refusal
from pipeline.exports.media import IMAGE_ROW_S, ExportSample, SampleReader
from pipeline.exports.own_folder import OwnFolder, target_tree
from pipeline.exports.rows import as_json, json_bytes, parts_of
from pipeline.output.recorded_job import RecordedJob
from pipeline.storage.tree import Tree


@dataclass(frozen=True)
class ImageTars(OwnFolder):
    """The export of images and texts as tars."""

    reader: SampleReader
    tree: Tree
    rows_per_file: int

    @classmethod
    def of(cls, job: RecordedJob[Any], config: TarExportConfig, dotted: str) -> ImageTars:
        """Check the job; ConfigError as `SampleReader.of`."""
        reader = SampleReader.of(job, config.columns, dotted)
        return cls(reader, target_tree(job, config.path, f"{dotted}.path"), job.config.sink.rows_per_file)

    def parts(self) -> list[ExportPart]:
        """Return a part for each published file of `data/`."""
        return parts_of(self.reader.output, IMAGE_ROW_S, self.rows_per_file)

    def export(self, name: str) -> PartOutcome:
        """Write the tar of a published file; one whose rows were all made again elsewhere has no tar."""
        relative, refused, num_rows = f"{stem_of(name)}.tar", list[Refusal](), 0
        with self.tree.writing(relative) as file, tarfile.open(fileobj=file, mode="w") as tar:
            for sample in self.reader.read(name, refused):
                _add(tar, key_of(name, sample.index), sample, self.reader.columns)
                num_rows += 1
        if not num_rows:
            self.tree.remove(relative)
        return PartOutcome(num_rows, 0, tuple(refused))

    def finish(self, ledger: ExportLedger) -> None:
        """Tars have no common file."""


def _add(tar: tarfile.TarFile, key: str, sample: ExportSample, columns: tuple[str, ...]) -> None:
    facts = {"key": key, "caption": sample.text, **as_json(sample.row, columns)}
    if sample.image is not None:
        facts["sha256"] = hashlib.sha256(sample.image).hexdigest()
        add_member(tar, f"{key}.{sample.suffix}", sample.image)
    add_member(tar, f"{key}.txt", sample.text.encode("utf-8", "backslashreplace"))
    add_member(tar, f"{key}.json", json_bytes(facts))


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a regular file without owner and time, so that equal content gives equal bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    stream: BinaryIO = io.BytesIO(data)
    tar.addfile(member, stream)


def stem_of(name: str) -> str:
    """Return `part-000003` for `data/part-000003.parquet`."""
    return name.rpartition("/")[2].removesuffix(".parquet")


def key_of(name: str, index: int) -> str:
    """Return the key of a row of a published file: the digits of the file's name, and the row's index."""
    return f"{''.join(char for char in stem_of(name) if char.isdigit())}{index:08d}"
