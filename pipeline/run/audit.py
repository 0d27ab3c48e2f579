"""Audits an output against its manifest: samples, rows and files. Reads only the output and changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from configs.load import ConfigError
from pipeline.output.checksums import Verified, verify
from pipeline.output.files import list_published, read_found
from pipeline.output.inventory import take_inventory
from pipeline.output.output_ids import ids_of_several_rows
from pipeline.output.publishing import FOLDERS
from pipeline.rows.schemas import SCHEMA_VERSION, SCHEMA_VERSION_KEY
from pipeline.run.resume import fingerprints_of
from pipeline.source import spans
from pipeline.source.done_bitmap import DoneBitmap
from pipeline.source.manifest import Manifest
from pipeline.source.manifest_parts import read_parts, with_counts
from pipeline.source.shards import plan_shard
from pipeline.storage import access
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir
from pipeline.storage.shard import Shard

MAX_NAMED = 20


@dataclass(frozen=True)
class Audit:
    """Findings of an audit: `problems` never occur in a finalized output, `waiting` is work left to a resumed job."""

    num_files: int
    num_samples: int | None
    num_rows: dict[str, int]
    num_missing: int | None
    missing: list[str]
    """The first missing samples as `path#row`, at most `MAX_NAMED`."""
    problems: list[str]
    waiting: list[str]
    verified: str
    """Number of files compared with their SHA-256, and the time taken, as one line of text."""

    @property
    def is_complete(self) -> bool:
        return self.num_missing == 0 and not self.waiting

    def lines(self) -> list[str]:
        samples = "an unknown number of" if self.num_samples is None else f"{self.num_samples:,}"
        missing = "an unknown number, because some files were not read to their end"
        text = [
            f"manifest  {self.num_files:,} files, {samples} samples",
            f"rows      {self.num_rows[DATA]:,} in data/, {self.num_rows[ERRORS]:,} in errors/",
            f"missing   {missing if self.num_missing is None else f'{self.num_missing:,}'}",
        ]
        text += [f"  {name}" for name in self.missing]
        text += [self.verified] if self.verified else []
        for label, lines in (("waiting", self.waiting), ("problems", self.problems)):
            text += [f"{label:<9} {len(lines):,}", *(f"  {line}" for line in lines[:MAX_NAMED])]
        return text


def audit(output: OutputDir) -> Audit:
    """Audit an output, with all of its shards, by reading all of its files; raise ConfigError if no job has started in
    it."""
    manifest = read_parts(output)
    if manifest is None or (manifest.num_shards == 1 and not output.list_attempts()):
        raise ConfigError(f"{output.shown()} holds no manifest and attempts of a job")
    manifest = with_counts(manifest, output)
    if manifest.num_shards > 1:
        return _audit_shards(output, manifest)
    return _audit(output, manifest, [*_ids_twice(output)])


def _audit_shards(output: OutputDir, manifest: Manifest) -> Audit:
    """Audit every shard, and compare the ids of all of them."""
    views = [replace(output, shard=Shard(number, manifest.num_shards)) for number in range(manifest.num_shards)]
    found = [_audit(view, manifest, []) if view.list_attempts() else _not_started(view, manifest) for view in views]
    counts = [one.num_missing for one in found]

    def lines(of: Callable[[Audit], list[str]]) -> list[str]:
        return [f"shard {view.shard}: {line}" for view, one in zip(views, found, strict=True) for line in of(one)]

    known = {
        f"{folder}/{view.prefix}{name}" for view in views for folder in FOLDERS for name in view.list_files(folder)
    }
    unknown = [name for name in list_published(output, *FOLDERS) if name not in known]
    return Audit(
        manifest.num_files,
        manifest.num_samples,
        {folder: sum(one.num_rows[folder] for one in found) for folder in FOLDERS},
        None if None in counts else sum(count or 0 for count in counts),
        [name for one in found for name in one.missing][:MAX_NAMED],
        [
            *lines(lambda one: one.problems),
            *(f"{name}: it belongs to no shard" for name in unknown),
            *_ids_twice(output),
        ],
        lines(lambda one: one.waiting),
        "\n".join(lines(lambda one: [one.verified] if one.verified else [])),
    )


def _not_started(output: OutputDir, manifest: Manifest) -> Audit:
    """Return the audit of a shard without attempts."""
    num_missing, missing = _missing(manifest, DoneBitmap(manifest.counts), None, output.shard)
    waiting = [f"not started; run the job with --shard {output.shard}"]
    return Audit(0, 0, dict.fromkeys(FOLDERS, 0), num_missing, missing, [], waiting, "")


def _audit(output: OutputDir, manifest: Manifest, problems: list[str]) -> Audit:
    """Audit an output without shards, or the view of one shard; `problems` are added to the problems found."""
    attempts = fingerprints_of(output)
    record = output.read_attempt(max(attempts))
    found = take_inventory(output, manifest, _rows_per_sample(output, record), attempts)
    verified, doubled = verify(output), found.doubled.items()
    num_missing, missing = _missing(manifest, found.accounts.done(), record.get("limit"), output.shard)
    waiting = [
        *(f"{one.relative}: {one.num_rows} rows to be published" for one in found.spooled),
        *(f"{name}: its rows are published" for name in found.spent),
        *(f"{name}: {int(mask.sum())} errors have a result" for name, mask in found.superseded.items()),
    ]
    problems = [
        *(f"{one.relative}: {one.problem}" for one in found.strange),
        *(f"{name}: {len(ids)} rows are in another file too: {', '.join(ids[:5])}" for name, ids in doubled),
        *problems,
        *_wrong_files(output, verified),
    ]
    num_rows, line = found.num_rows, verified.line()
    return Audit(manifest.num_files, manifest.num_samples, num_rows, num_missing, missing, problems, waiting, line)


def _rows_per_sample(output: OutputDir, record: dict[str, Any]) -> int | None:
    """Return the number of rows per sample in an attempt's configuration; None if columns of the rows contain it."""
    config = record.get("config") or yaml.safe_load(output.read_bytes("_job/config.yaml"))  # records before 0.2
    number = config["sampling"].get("num_images_per_prompt")
    if number is not None:
        return int(number)
    video = config["source"]["video"]
    several = (
        video["clip_s"] is not None or video.get("split") == "shots" or config["columns"].get("prompts") is not None
    )
    return None if several else 1


def _missing(manifest: Manifest, done: DoneBitmap, limit: int | None, shard: Shard) -> tuple[int | None, list[str]]:
    """Return the number of a shard's missing samples (None if unknown) and the names of the first ones."""
    planned = plan_shard(manifest.files, manifest.cuts, shard.number, 1_000_000, 1 << 60)
    if limit is not None:
        planned = spans.take(planned, limit, lambda file, at_most: int(max(0, done.counts[file])))
    return spans.num_missing(planned, done), list(itertools.islice(_names(manifest, done, planned), MAX_NAMED))


def _names(manifest: Manifest, done: DoneBitmap, planned: spans.Spans) -> Iterator[str]:
    for file, start, stop in itertools.chain.from_iterable(spans.remaining(planned, done)):
        path = manifest.files["path"][file].as_py()
        if stop is None and done.counts[file] < 0:
            yield f"{path}: from row {len(done.rows(file, 0, None))} on, as far as is known"
        rows = np.flatnonzero(~done.rows(file, start, stop)) + start
        yield from (f"{path}#{row}" for row in rows.tolist())


def _ids_twice(output: OutputDir) -> Iterator[str]:
    """Yield one problem per folder in which several rows have the same `sample_id`."""
    for folder in (DATA, ERRORS):
        twice = ids_of_several_rows(output, list_published(output, folder))
        if twice:
            yield f"{folder}/: {len(twice)} ids are there more than once: {', '.join(twice[:5])}"


def _wrong_files(output: OutputDir, verified: Verified) -> Iterator[str]:
    """Yield published files with a wrong or missing checksum, or a schema that differs from the first file's."""
    first: pa.Schema | None = None
    for relative in list_published(output, DATA, ERRORS):
        if read_found(output, relative, ()).problem:
            continue
        if relative in verified.problems:
            yield f"{relative}: {verified.problems[relative]}"
        elif relative in verified.unreadable:
            yield f"{relative}: the note of its checksum is damaged"
        elif relative not in verified.sound:
            yield f"{relative}: no checksum was noted"
        else:
            with access.open_file(output.filesystem, output.path(relative)) as file:
                schema = pa.parquet.read_schema(file)
            version = (schema.metadata or {}).get(SCHEMA_VERSION_KEY, b"").decode()
            if version != str(SCHEMA_VERSION):
                yield f"{relative}: schema version {version or 'none'}, not {SCHEMA_VERSION}"
            first = first or schema
            if not schema.equals(first, check_metadata=False):
                yield f"{relative}: its columns are not those of the other files"
