"""Compares the stored manifest of an output with a new listing of the source, and appends new files.

Rows of listed files never change; new files become a new manifest part. Only new files are opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from configs.load import ConfigError
from configs.source import SourceConfig
from pipeline.cluster.partitions import IN_PROCESS, Workers
from pipeline.formats.kind import Needs
from pipeline.manifest.done_bitmap import UNKNOWN, Bools, Ints, PathIndex
from pipeline.manifest.freezing import freeze_for, list_source, survey_files, with_repeated_rows
from pipeline.manifest.manifest import CUT_KEY, KEEP_KEY, PARTS, ROOT_KEY, SCHEMA, Manifest, part_name
from pipeline.manifest.manifest_checks import MAX_SAMPLES, as_files, most_rows, problem_of_files
from pipeline.manifest.shards import Cut
from pipeline.manifest.survey import survey
from pipeline.storage import access
from pipeline.storage.damage import NO_FILE_ERRNOS, DamagedFile
from pipeline.storage.digests import OTHER_BYTES, Digest
from pipeline.storage.listing import Skipped
from pipeline.storage.output_dir import JOB, OutputDir
from pipeline.storage.parquet_files import read_parquet

COUNTS = "_job/counts"
ACCEPT_TOUCHED = "--accept-touched"
"""The command-line switch for `accept_touched` of `reopen`."""
MAX_PART_BYTES = 1 << 31
_MAX_NAMED = 3
_FACTS = ["num_samples", "row_group_rows", "row_group_bytes"]
"""Facts that must be equal for a file to count as a copy."""


@dataclass(frozen=True)
class Reopened:
    """A manifest that begins with the files of earlier attempts; `gone` are ordinals of files that the source no longer
    has."""

    manifest: Manifest
    gone: Ints


def reopen(needs: Needs, output: OutputDir, accept_touched: bool = False, workers: Workers = IN_PROCESS) -> Reopened:
    """Return the output's manifest with the source's new files appended, or a new manifest if the output has none.

    With `accept_touched`, a listed file with another modification time or etag counts as unchanged if its size and, as
    far as the kind knows them before reading, its rows and row groups are equal, as after copying the source.

    Raises:
        ConfigError: the source cannot be listed, a listed file has changed, new files have other columns, or the output
            has another number of shards.
    """
    with access.refusals("sink.path", output.url):
        manifest = read_parts(output)
    if manifest is None:
        return Reopened(replace(freeze_for(needs, workers), num_shards=output.shard.total), np.zeros(0, np.int64))
    _refuse_other_shards(manifest, output)
    skipped = Skipped()
    filesystem, root, listing = list_source(needs.source, skipped)
    manifest = replace(manifest, root=access.unstripped(filesystem, root), skipped=dict(skipped.counts))
    if manifest.files["path"].equals(listing["path"]):
        ordinals: Ints = np.arange(listing.num_rows)
    else:
        ordinals = PathIndex(manifest.files["path"]).find(listing["path"].combine_chunks())
    listed, new = np.flatnonzero(ordinals >= 0), np.flatnonzero(ordinals < 0)
    earlier, now = manifest.files.take(pa.array(ordinals[listed])), listing.take(pa.array(listed))
    if accept_touched:
        now = _with_equal_tokens(filesystem, root, needs, earlier, now, workers)
    _refuse_changed(earlier, now, output)
    missing = np.setdiff1d(np.arange(manifest.num_files), ordinals)
    if len(new):
        fresh = survey_files(filesystem, root, listing.take(pa.array(new)), needs, workers, manifest)
        manifest = _with_files(manifest, fresh.files, fresh.keep)
    return Reopened(manifest, missing)


def _with_files(earlier: Manifest, new: pa.Table, keep: pa.Schema) -> Manifest:
    """Append new files to a manifest; ConfigError if their kept columns have other types."""
    if new.num_rows and not keep.equals(earlier.keep):
        new_types, old_types = (
            ", ".join(f"{field.name} {field.type}" for field in schema) for schema in (keep, earlier.keep)
        )
        raise ConfigError(
            f"sink.keep_columns: new files of the source have the types {new_types}, and those before them "
            f"{old_types}; give them an output of their own"
        )
    return replace(earlier, files=pa.concat_tables([earlier.files, new]).combine_chunks())


def write_parts(manifest: Manifest, output: OutputDir, source: SourceConfig, workers: Workers = IN_PROCESS) -> Manifest:
    """Write the manifest's new files as a part after the parts of all other attempts; returns the output's manifest.

    Two attempts that are planned concurrently while the source grows may both have new files. Parts are created and
    never replaced; the later attempt keeps the earlier attempt's part, adds only files that are not in it, and compares
    their ids with it.

    Raises:
        ConfigError: another attempt listed the same file with another size or token, or other column types.
    """
    while True:  # ends, because every other attempt writes one part
        manifest = _after_stored_parts(manifest, output, source, workers)
        try:
            manifest.write(output)
        except FileExistsError:
            continue
        return manifest


def _after_stored_parts(manifest: Manifest, output: OutputDir, source: SourceConfig, workers: Workers) -> Manifest:
    """Insert parts that were created after the manifest was planned in front of the manifest's new files."""
    if len(output.list_files(PARTS)) <= manifest.num_parts:
        return manifest
    stored = read_parts(output)
    assert stored is not None
    _refuse_other_shards(stored, output)
    ordinals = PathIndex(stored.files["path"]).find(manifest.files["path"].combine_chunks())
    listed = np.flatnonzero(ordinals >= 0)
    # The first `written` files are in both manifests; they were compared when this attempt was planned.
    shared = listed[listed >= manifest.written]
    _refuse_changed(stored.files.take(pa.array(ordinals[shared])), manifest.files.take(pa.array(shared)), output)
    new = manifest.files.take(pa.array(np.flatnonzero(ordinals < 0)))
    joined = replace(_with_files(stored, new, manifest.keep), root=manifest.root, skipped=manifest.skipped)
    if not new.num_rows:
        return joined
    filesystem, root = access.open_url(joined.root, "source.path")
    return with_repeated_rows(filesystem, root, source, joined, workers)


def missing_files(planned: Manifest, stored: Manifest) -> Ints:
    """Return the ordinals in `stored` of files that other attempts listed after `planned` was read from the parts, and
    that its listing of the source does not have."""
    added = stored.files["path"].slice(planned.written)
    listed = PathIndex(planned.files["path"]).find(added.combine_chunks())
    return np.asarray(planned.written + np.flatnonzero(listed < 0))


def _refuse_other_shards(stored: Manifest, output: OutputDir) -> None:
    if stored.num_shards != output.shard.total:
        begun = f"with {stored.num_shards} shards" if stored.num_shards > 1 else "without shards"
        advice = f"--shard I/{stored.num_shards}" if stored.num_shards > 1 else "no --shard"
        raise ConfigError(
            f"--shard: {output.shown()} was begun {begun}; go on with {advice}, or choose another sink.path"
        )


def _with_equal_tokens(
    filesystem: Any, root: str, needs: Needs, earlier: pa.Table, now: pa.Table, workers: Workers
) -> pa.Table:
    """Keep the earlier token of a file if only the token differs: size, rows and row groups are equal."""
    rows = np.flatnonzero(_differ(earlier, now, "token") & ~_differ(earlier, now, "size_bytes"))
    if not len(rows):
        return now
    touched = pa.array(rows)
    result = survey(filesystem, root, now.take(touched), needs, workers)
    pairs = zip(result.facts.select(_FACTS).to_pylist(), earlier.take(touched).select(_FACTS).to_pylist(), strict=True)
    tokens = now["token"].to_pylist()
    for row, (facts, expected) in zip(rows.tolist(), pairs, strict=True):
        if facts == expected:
            tokens[row] = earlier["token"][row].as_py()
    index = now.schema.get_field_index("token")
    return now.set_column(index, now.schema.field(index), pa.array(tokens, pa.string()))


def _differ(earlier: pa.Table, now: pa.Table, name: str) -> Bools:
    if earlier[name].equals(now[name]):
        return np.zeros(earlier.num_rows, bool)
    pairs = zip(earlier[name].to_pylist(), now[name].to_pylist(), strict=True)
    return np.fromiter((old != new for old, new in pairs), bool, earlier.num_rows)


def _refuse_changed(earlier: pa.Table, now: pa.Table, output: OutputDir) -> None:
    resized = _differ(earlier, now, "size_bytes")
    changed = np.flatnonzero(resized | _differ(earlier, now, "token"))
    if len(changed):
        names = ", ".join(earlier["path"][row].as_py() for row in changed[:_MAX_NAMED].tolist())
        more = f" and {len(changed) - _MAX_NAMED:,} more" if len(changed) > _MAX_NAMED else ""
        raise ConfigError(
            f"source.path: {names}{more} changed since {output.shown()} was begun (size, etag or time); what is there "
            "was made from the old files: choose another sink.path"
            + ("" if resized.any() else f", or, if the source was only copied, go on with {ACCEPT_TOUCHED}")
        )


def read_parts(output: OutputDir) -> Manifest | None:
    """Read the manifest of an output; None if there is none, DamagedFile if a part is damaged."""
    tables: list[pa.Table] = []
    cuts: list[Cut] = []
    names = output.list_files(PARTS)
    recorded = output.digests(PARTS)
    first = 0
    for number, name in enumerate(names):
        relative = f"{PARTS}/{name}"
        try:
            if name != part_name(number).rpartition("/")[2]:
                raise ValueError(f"part {number} is missing, or this is no file of a job")
            data = output.read_bytes(relative, MAX_PART_BYTES)
            digests = recorded.get(relative.removeprefix(f"{JOB}/"), ())
            if digests and Digest.of(data) not in digests:
                raise ValueError(OTHER_BYTES)
            table, cut = _parsed(data, first)
            if (tables and (cut is None) == bool(cuts)) or (cut and cuts and cut.count != cuts[0].count):
                raise ValueError("it is cut into another number of shards than the first part")
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in NO_FILE_ERRNOS:
                raise
            advice = (
                f"move {output.shown(PARTS)} and {output.shown(COUNTS)} away and start the job again: it lists the "
                "source anew and keeps the finished rows (changed files are not noticed then)"
            )
            raise DamagedFile(output.shown(relative), relative, access.reason_of(error), advice) from None
        tables.append(table)
        cuts += [cut] if cut else []
        first += table.num_rows
    if not tables:
        return None
    footer = tables[0].schema.metadata
    files = pa.concat_tables([table.replace_schema_metadata(None) for table in tables]).combine_chunks()
    num_shards = cuts[0].count if cuts else 1
    keep = _kept_schema(footer)
    return Manifest(footer[ROOT_KEY].decode(), files, keep, files.num_rows, len(names), num_shards, tuple(cuts))


def _parsed(data: bytes, first: int) -> tuple[pa.Table, Cut | None]:
    """Parse a part, whose first file has the ordinal `first`, to its files with its metadata, and its cut into shards;
    ValueError, with the reason, if it is damaged."""
    table = read_parquet(data)
    footer = table.schema.metadata or {}
    if not {ROOT_KEY, KEEP_KEY} <= footer.keys():
        raise ValueError("it is no manifest of a job")
    files = as_files(table, SCHEMA)
    if problem := problem_of_files(files):
        raise ValueError(problem)
    footer[ROOT_KEY].decode()
    _kept_schema(footer)
    cut = Cut.from_json(footer[CUT_KEY]) if CUT_KEY in footer else None
    if cut is not None:
        cut.check(first, files["num_samples"].fill_null(UNKNOWN).to_numpy())
    return files.replace_schema_metadata(footer), cut


def _kept_schema(footer: Mapping[bytes, bytes]) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(footer[KEEP_KEY].decode())))
    except Exception as error:  # pyarrow raises errors of no common class
        raise ValueError(f"the types of kept columns cannot be read: {access.reason_of(error)}") from None


# --- counts known only after reading -------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoteCount:
    """Stores the number of samples of each source file in the name of a small file, so that one listing returns all."""

    output: OutputDir

    def __call__(self, file: int, num_samples: int, is_broken: bool) -> None:
        """Store a file's count; `is_broken` means that it is damaged and that the last counted row is its error row."""
        name = f"{COUNTS}/{file:08d}-{num_samples}{'-broken' if is_broken else ''}"
        self.output.write_bytes(name, b"-")


def _notes(output: OutputDir) -> dict[int, list[tuple[bool, int]]]:
    """Map a file's ordinal to its stored counts as (was read to its end, count)."""
    notes: dict[int, list[tuple[bool, int]]] = {}
    for name in output.list_files(COUNTS):
        file, _, rest = name.partition("-")
        count, _, broken = rest.partition("-")
        if file.isdecimal() and count.isdecimal():
            notes.setdefault(int(file), []).append((not broken, int(count)))
    return notes


def broken_files(output: OutputDir) -> set[int]:
    """Return the ordinals of files of unknown count that were read up to damage and never to their end."""
    return {file for file, notes in _notes(output).items() if not any(is_complete for is_complete, _ in notes)}


def with_counts(manifest: Manifest, output: OutputDir, forget_broken: bool = False) -> Manifest:
    """Fill in the counts that earlier attempts have stored; `forget_broken` ignores the counts of damaged files."""
    if not manifest.files["num_samples"].null_count:
        return manifest
    numbers = manifest.counts.copy()
    for file, notes in _notes(output).items():
        notes = [note for note in notes if note[0] or not forget_broken]
        if notes and file < len(numbers):
            _check_count(manifest, output, file, max(notes)[1])
            numbers[file] = max(notes)[1]
    if (total := int(np.maximum(numbers, 0).sum())) > MAX_SAMPLES:
        reason = f"the files of the source have {total:,} rows, more than {MAX_SAMPLES:,}"
        raise DamagedFile(output.shown(COUNTS), COUNTS, reason, "remove it; the job counts the rows again")
    position = SCHEMA.get_field_index("num_samples")
    column = pa.array(numbers, pa.int64(), mask=numbers == UNKNOWN)
    return replace(manifest, files=manifest.files.set_column(position, SCHEMA.field(position), column))


def _check_count(manifest: Manifest, output: OutputDir, file: int, count: int) -> None:
    """Raise DamagedFile for a count that the file cannot have."""
    size = manifest.files["size_bytes"][file].as_py()
    if count <= int(most_rows(np.array([size], np.int64))[0]):
        return
    names = (name for name in output.list_files(COUNTS) if name.startswith(f"{file:08d}-{count}"))
    relative = f"{COUNTS}/{next(names, '')}"
    reason = f"it counts {count:,} rows in {manifest.files['path'][file].as_py()}, which has {size:,} bytes"
    raise DamagedFile(output.shown(relative), relative, reason, "remove it; the job counts the rows again")
