"""Audits an output: every sample of its manifest, every row, every file; changes nothing.

Reads only the output: the manifest, `data/`, `errors/`, the spool, checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import yaml

from configs.load import ConfigError
from pipeline.output.checksums import Verified, verify
from pipeline.output.files import list_published, read_all_found, read_found
from pipeline.output.inventory import Inventory, take_inventory
from pipeline.rows.schemas import SCHEMA_VERSION, SCHEMA_VERSION_KEY
from pipeline.run.resume import fingerprints_of
from pipeline.source import spans
from pipeline.source.ids import repeated_ids
from pipeline.source.manifest import Manifest
from pipeline.source.manifest_parts import read_parts, with_counts
from pipeline.storage import access
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir

MAX_NAMED = 20


@dataclass
class Audit:
    """Findings. A problem is a state that a finalized job never leaves; pending rows are none."""

    num_files: int
    num_samples: int | None
    num_rows: dict[str, int]
    num_missing: int | None = None
    missing: list[str] = field(default_factory=list)
    """The first of them, as `path#row`."""
    problems: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    verified: str = ""
    """How much was read to compare digests, and how long it took."""

    @property
    def is_complete(self) -> bool:
        """Whether every sample has its rows in the right folders."""
        return self.num_missing == 0 and not self.waiting

    def lines(self) -> list[str]:
        """As text."""
        samples = "an unknown number of" if self.num_samples is None else f"{self.num_samples:,}"
        missing = "an unknown number, because some files were not read to their end"
        told = [
            f"manifest  {self.num_files:,} files, {samples} samples",
            f"rows      {self.num_rows[DATA]:,} in data/, {self.num_rows[ERRORS]:,} in errors/",
            f"missing   {missing if self.num_missing is None else f'{self.num_missing:,}'}",
        ]
        told += [f"  {name}" for name in self.missing]
        told += [self.verified] if self.verified else []
        for label, lines in (("waiting", self.waiting), ("problems", self.problems)):
            told.append(f"{label:<9} {len(lines):,}")
            told += [f"  {line}" for line in lines[:MAX_NAMED]]
        return told


def audit(output: OutputDir) -> Audit:
    """Look at everything in an output.

    Raises:
        ConfigError: nothing there was begun by a job.
        OSError: the store does not answer.
    """
    manifest = read_parts(output)
    attempts = fingerprints_of(output)
    if manifest is None or not attempts:
        raise ConfigError(f"{output.shown()} holds no manifest and attempts of a job")
    manifest = with_counts(manifest, output)
    record = output.read_attempt(max(attempts))
    found = take_inventory(output, manifest, rows_per_sample(output), attempts)
    audited = Audit(manifest.num_files, manifest.num_samples, found.num_rows)
    _count_missing(audited, manifest, found, record.get("limit"))
    audited.waiting += [f"{one.relative}: {one.num_rows} rows to be published" for one in found.spooled]
    audited.waiting += [f"{name}: its rows are published" for name in found.spent]
    audited.waiting += [f"{name}: {int(mask.sum())} errors have a result" for name, mask in found.superseded.items()]
    audited.problems += [f"{one.relative}: {one.problem}" for one in found.strange]
    for name, ids in found.doubled.items():
        audited.problems.append(f"{name}: {len(ids)} rows are in another file too: {', '.join(ids[:5])}")
    audited.problems += _ids_twice(output)
    verified = verify(output)
    audited.verified = verified.line()
    audited.problems += _wrong_files(output, verified)
    return audited


def rows_per_sample(output: OutputDir) -> int | None:
    """The number of rows of a sample, by the newest attempt's configuration; None if the rows contain it."""
    record = output.read_attempt(max(output.list_attempts()))
    config = record.get("config") or yaml.safe_load(output.read_bytes("_job/config.yaml"))  # records of before 0.2
    number = config["sampling"].get("num_images_per_prompt")
    if number is not None:
        return int(number)
    several = config["source"]["video"]["clip_s"] is not None or config["columns"].get("prompts") is not None
    return None if several else 1


def _count_missing(audited: Audit, manifest: Manifest, found: Inventory, limit: int | None) -> None:
    done = found.done()
    planned = spans.plan(manifest.files, 1_000_000, 1 << 60)
    if limit is not None:
        planned = spans.take(planned, limit, lambda file, at_most: int(max(0, done.counts[file])))
    audited.num_missing = spans.num_missing(planned, done)
    for span in spans.remaining(planned, done):
        for file, start, stop in span:
            path = manifest.files["path"][file].as_py()
            if stop is None and done.counts[file] < 0:
                audited.missing.append(f"{path}: from row {len(done.rows(file, 0, None))} on, as far as is known")
            rows = np.flatnonzero(~done.rows(file, start, stop)) + start
            audited.missing += [f"{path}#{row}" for row in rows[: MAX_NAMED - len(audited.missing)].tolist()]
            if len(audited.missing) >= MAX_NAMED:
                return


def _ids_twice(output: OutputDir) -> Iterator[str]:
    """Ids of rows that occur more than once within a folder, of any sample."""
    for folder in (DATA, ERRORS):
        tables = (one.table for one in read_all_found(output, list_published(output, folder), ("sample_id",)))
        parts = [table["sample_id"].to_numpy(zero_copy_only=False) for table in tables if table is not None]
        twice = repeated_ids(parts)
        if twice:
            yield f"{folder}/: {len(twice)} ids are there more than once: {', '.join(twice[:5])}"


def _wrong_files(output: OutputDir, verified: Verified) -> Iterator[str]:
    """Published files whose bytes are not those that were written, or whose columns differ from the first one's."""
    first: pa.Schema | None = None
    for folder in (DATA, ERRORS):
        for relative in list_published(output, folder):
            if read_found(output, relative, ()).problem:
                continue
            if relative in verified.problems:
                yield f"{relative}: {verified.problems[relative]}"
                continue
            if relative not in verified.sound:
                is_there = relative in verified.unreadable
                yield f"{relative}: {'the note of its checksum is damaged' if is_there else 'no checksum was noted'}"
                continue
            with access.open_file(output.filesystem, output.path(relative)) as file:
                schema = pa.parquet.read_schema(file)
            version = (schema.metadata or {}).get(SCHEMA_VERSION_KEY, b"").decode()
            if version != str(SCHEMA_VERSION):
                yield f"{relative}: schema version {version or 'none'}, not {SCHEMA_VERSION}"
            first = first or schema
            if not schema.equals(first, check_metadata=False):
                yield f"{relative}: its columns are not those of the other files"
