"""Checks an output against its manifest: samples, rows and files. Reads only the output and changes nothing.

A damaged file is named, and everything that does not need it is checked.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from configs.load import ConfigError
from configs.yaml_file import parse
from files.plurals import counted
from pipeline.check.records import problems_of_records
from pipeline.manifest import spans
from pipeline.manifest.done_bitmap import DoneBitmap
from pipeline.manifest.manifest import Manifest
from pipeline.manifest.manifest_parts import read_parts, with_counts
from pipeline.manifest.shards import plan_shard
from pipeline.output.checksums import Verified, read_note, verify
from pipeline.output.files import Found, checksum_name, list_published, list_spooled, read_found
from pipeline.output.inventory import problem_of, spool_problems, take_inventory
from pipeline.output.output_ids import ids_of_several_rows
from pipeline.output.publishing import FOLDERS
from pipeline.rows.schemas import SCHEMA_VERSION, SCHEMA_VERSION_KEY
from pipeline.run.resume import WHOLE_FILE_BYTES, WHOLE_FILE_ROWS, doubled_rows, limited
from pipeline.storage import access
from pipeline.storage.damage import DamagedFile
from pipeline.storage.output_dir import ATTEMPTS, DATA, ERRORS, JOB, MAX_RECORD_BYTES, OutputDir
from pipeline.storage.parquet_files import DamagedParquet, open_parquet
from pipeline.storage.shard import MAX_SHARDS, Shard

MAX_NAMED = 20


@dataclass(frozen=True)
class OutputCheck:
    """Findings of a check: `problems` never occur in a finalized output, `waiting` is work left to a resumed job."""

    num_files: int | None
    """None if the manifest is damaged."""
    num_samples: int | None
    num_rows: dict[str, int]
    num_missing: int | None
    missing: list[str]
    """The first missing samples as `path#row`, at most `MAX_NAMED`."""
    problems: list[str]
    waiting: list[str]
    verified: str
    """Number of files compared with their SHA-256, and the time taken, as one line of text."""
    limited: list[str] = field(default_factory=list)
    """Samples that are not planned, because the newest attempt had `--limit`."""

    @property
    def is_complete(self) -> bool:
        return self.num_missing == 0 and not self.waiting and not self.limited

    def lines(self) -> list[str]:
        """Return the findings as lines of text."""
        samples = "an unknown number of" if self.num_samples is None else f"{self.num_samples:,}"
        listed, reason = "damaged", "the manifest is damaged"
        if self.num_files is not None:
            files = counted(self.num_files, "file")
            listed, reason = f"{files}, {samples} samples", "some files were not read to their end"
        missing = f"an unknown number, because {reason}" if self.num_missing is None else f"{self.num_missing:,}"
        text = [
            f"manifest  {listed}",
            f"rows      {self.num_rows[DATA]:,} in data/, {self.num_rows[ERRORS]:,} in errors/",
            f"missing   {missing}",
        ]
        text += [f"  {name}" for name in self.missing]
        text += [f"limited   {line}" for line in self.limited]
        text += self.verified.splitlines()
        for label, lines in (("waiting", self.waiting), ("problems", self.problems)):
            more = [f"  and {len(lines) - MAX_NAMED:,} more"] if len(lines) > MAX_NAMED else []
            text += [f"{label:<9} {len(lines):,}", *(f"  {line}" for line in lines[:MAX_NAMED]), *more]
        return [access.printable(line) for line in text]


def check_output(output: OutputDir) -> OutputCheck:
    """Check an output, with all of its shards, by reading all of its files; raise ConfigError if no job has started in
    it."""
    output.refuse_links()
    problems: list[str] = []
    manifest: Manifest | None = None
    try:
        manifest = read_parts(output)
        if manifest is None or (manifest.num_shards == 1 and not output.list_attempts()):
            raise ConfigError(f"{output.shown()} holds no manifest and attempts of a job")
        manifest = with_counts(manifest, output)
    except DamagedFile as error:  # a manifest whose counts are damaged is one of unknown counts
        problems.append(f"{error.relative}: {error.reason}")
    views = _views_of(output, manifest)
    if views == [output]:
        return _check_one(output, manifest, [*problems, *_ids_twice(output)])
    return _check_shards(output, manifest, views, problems)


def _views_of(output: OutputDir, manifest: Manifest | None) -> list[OutputDir]:
    """Return the views of all shards; without a manifest, of those that have started."""
    if manifest is not None:
        numbers, total = list(range(manifest.num_shards)), manifest.num_shards
    else:
        folders = {name.partition("/")[0] for name in output.list_files(f"{JOB}/shards")}
        numbers, total = sorted(int(name) for name in folders if name.isdecimal() and len(name) == 4), MAX_SHARDS
    views = [replace(output, shard=Shard(number, total)) for number in numbers if number < total]
    return views if total > 1 and views else [output]


def _check_shards(
    output: OutputDir, manifest: Manifest | None, views: list[OutputDir], problems: list[str]
) -> OutputCheck:
    """Check every shard, and compare the ids of all of them."""
    checks = [
        _check_one(view, manifest, []) if manifest is None or view.list_attempts() else _not_started(view, manifest)
        for view in views
    ]
    counts = [check.num_missing for check in checks]

    def lines(of: Callable[[OutputCheck], list[str]]) -> list[str]:
        names = [view.shard.number if manifest is None else view.shard for view in views]
        return [f"shard {name}: {line}" for name, check in zip(names, checks, strict=True) for line in of(check)]

    known = {
        f"{folder}/{view.prefix}{name}" for view in views for folder in FOLDERS for name in view.list_files(folder)
    }
    unknown = [name for name in list_published(output, *FOLDERS) if name not in known]
    return OutputCheck(
        None if manifest is None else manifest.num_files,
        None if manifest is None else manifest.num_samples,
        {folder: sum(check.num_rows[folder] for check in checks) for folder in FOLDERS},
        None if None in counts else sum(count or 0 for count in counts),
        [name for check in checks for name in check.missing][:MAX_NAMED],
        [
            *problems,
            *lines(lambda check: check.problems),
            *(f"{name}: it belongs to no shard" for name in unknown),
            *_ids_twice(output),
            *problems_of_records(output),
        ],
        lines(lambda check: check.waiting),
        "\n".join(lines(lambda check: [check.verified] if check.verified else [])),
        lines(lambda check: check.limited),
    )


def _not_started(output: OutputDir, manifest: Manifest) -> OutputCheck:
    """Return the check of a shard without attempts."""
    planned = _planned(manifest, DoneBitmap(manifest.counts), None, output.shard)
    num_missing, missing = _missing(manifest, DoneBitmap(manifest.counts), planned)
    waiting = [f"not started; run the job with --shard {output.shard}"]
    return OutputCheck(0, 0, dict.fromkeys(FOLDERS, 0), num_missing, missing, [], waiting, "")


def _check_one(output: OutputDir, manifest: Manifest | None, problems: list[str]) -> OutputCheck:
    """Check an output without shards, or the view of one shard; `problems` are added to the problems found.

    Without a manifest, rows are counted and belong to no sample.
    """
    records = _records(output)
    fingerprints = {
        number: None if record is None else str(record.get("config_fingerprint")) for number, record in records.items()
    }
    record = next((record for _, record in sorted(records.items(), reverse=True) if record is not None), {})
    verified = verify(output, is_tolerant=True)
    num_missing, missing, waiting, left_out = None, list[str](), list[str](), list[str]()
    if manifest is None:
        strange, num_rows = _strange_files(output, fingerprints, verified)
    else:
        rows, unrecorded = _rows_per_sample(output, record), verified.unrecorded
        inventory = take_inventory(output, manifest, rows, fingerprints, verified.problems, unrecorded=unrecorded)
        strange, num_rows, limit = inventory.strange, inventory.num_rows, record.get("limit")
        done = inventory.accounts.done()
        planned = _planned(manifest, done, limit, output.shard)
        num_missing, missing = _missing(manifest, done, planned)
        left_out = [] if limit is None else _limited(manifest, done, planned, limit, output.shard)
        waiting = [
            *(f"{file.relative}: {file.num_rows} rows to be published" for file in inventory.spooled),
            *(f"{name}: its rows are published" for name in inventory.spent),
            *(f"{name}: {int(mask.sum())} errors have a result" for name, mask in inventory.superseded.items()),
        ]
        problems = [*(f"{name}: {doubled_rows(ids)}" for name, ids in inventory.doubled.items()), *problems]
    problems = [
        *(f"{file.relative}: {file.problem}" for file in strange),
        *problems,
        *_wrong_files(output, verified, {file.relative for file in strange}),
        *problems_of_records(output),
    ]
    num_files, num_samples = (None, None) if manifest is None else (manifest.num_files, manifest.num_samples)
    return OutputCheck(
        num_files, num_samples, num_rows, num_missing, missing, problems, waiting, verified.line(), left_out
    )


def _records(output: OutputDir) -> dict[int, dict[str, Any] | None]:
    """Return the record of every attempt by its number; None for a damaged one."""
    records: dict[int, dict[str, Any] | None] = dict.fromkeys(output.list_attempts())
    recorded = output.digests(ATTEMPTS)
    for number in records:
        with contextlib.suppress(DamagedFile):
            records[number] = output.read_attempt(number, recorded)
    return records


def _strange_files(
    output: OutputDir, fingerprints: Mapping[int, str | None], verified: Verified
) -> tuple[list[Found], dict[str, int]]:
    """Return the damaged and unknown files, and the numbers of published rows in the others, by folder."""
    strange: list[Found] = []
    num_rows = dict.fromkeys(FOLDERS, 0)
    for folder in FOLDERS:
        spooled = list_spooled(output, folder)
        damaged = verified.problems | spool_problems(output, spooled)
        for relative in [*list_published(output, folder), *spooled]:
            file = Found(relative, problem=damaged.get(relative, ""))
            if not file.problem:
                file = read_found(output, relative, ("sample_id",), all_pages=relative in spooled)
            if problem := problem_of(file, fingerprints) or verified.unrecorded.get(relative, ""):
                strange.append(Found(relative, problem=problem))
            elif file.table is not None and relative not in spooled:
                num_rows[folder] += file.table.num_rows
    return strange, num_rows


def _rows_per_sample(output: OutputDir, record: dict[str, Any]) -> int | None:
    """Return the number of rows per sample in an attempt's configuration; None if columns of the rows contain it, or
    the configuration is damaged."""
    try:
        # Records before 0.2 had no configuration.
        config = record.get("config") or parse(output.read_bytes("_job/config.yaml", MAX_RECORD_BYTES).decode(), "it")
        number = config["sampling"].get("num_images_per_prompt")
        if number is not None:
            return int(number)
        if (number := config["sampling"].get("num_captions_per_prompt", 1)) > 1:
            return int(number)
        video = config["source"]["video"]
        is_cut = video["clip_s"] is not None or video.get("split") == "shots"
        return None if is_cut or config["columns"].get("prompts") is not None else 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _planned(manifest: Manifest, done: DoneBitmap, limit: int | None, shard: Shard) -> spans.Spans:
    """Return the samples of a shard that an attempt with this limit has planned."""
    planned = plan_shard(manifest.files, manifest.cuts, shard.number, WHOLE_FILE_ROWS, WHOLE_FILE_BYTES)
    if limit is None:
        return planned
    return spans.take(planned, limit, lambda file, at_most: int(max(0, done.counts[file])))


def _missing(manifest: Manifest, done: DoneBitmap, planned: spans.Spans) -> tuple[int | None, list[str]]:
    """Return the number of planned samples that are missing (None if unknown) and the names of the first ones."""
    return spans.num_missing(planned, done), list(itertools.islice(_names(manifest, done, planned), MAX_NAMED))


def _limited(manifest: Manifest, done: DoneBitmap, planned: spans.Spans, limit: int, shard: Shard) -> list[str]:
    """Return a line about the samples that a limit leaves out; none if it leaves out none."""
    text = limited(planned, _planned(manifest, done, None, shard), done.counts, limit)
    return [text] if text else []


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
        ids = ids_of_several_rows(output, list_published(output, folder))
        if ids:
            yield f"{folder}/: {len(ids)} ids are there more than once: {', '.join(ids[:5])}"


def _wrong_files(output: OutputDir, verified: Verified, strange: Collection[str]) -> Iterator[str]:
    """Yield sound published files with a wrong or missing checksum note, or another schema than the first file."""
    first: pa.Schema | None = None
    for relative in sorted(verified.sound - set(strange)):
        if relative in verified.unnoted:
            yield f"{relative}: no checksum was noted in {checksum_name(relative)}"
        elif relative in verified.unreadable:
            yield f"{checksum_name(relative)}: the note of the checksum is damaged"
        try:
            with open_parquet(output.filesystem, output.path(relative)) as file:
                schema, num_rows = file.schema_arrow, file.metadata.num_rows
        except (DamagedParquet, OSError) as error:  # replaced meanwhile
            yield f"{relative}: {access.reason_of(error)}"
            continue
        if relative not in (*verified.unnoted, *verified.unreadable):
            noted = (read_note(output, relative) or {}).get("num_rows")
            if noted != num_rows:
                yield f"{checksum_name(relative)}: it has {noted!r:.50} rows, and the file {num_rows:,}"
        version = (schema.metadata or {}).get(SCHEMA_VERSION_KEY, b"").decode(errors="replace")
        if version != str(SCHEMA_VERSION):
            yield f"{relative}: schema version {version or 'none'}, not {SCHEMA_VERSION}"
        first = first or schema
        if not schema.equals(first, check_metadata=False):
            yield f"{relative}: its columns are not those of the other files"
