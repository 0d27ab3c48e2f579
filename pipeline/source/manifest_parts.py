"""The manifest of an output that exists, held against the source as it is listed now.

What was listed stays as it was; new files become a part of their own behind it. Opens new files only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from configs.load import ConfigError
from pipeline.source.done_bitmap import UNKNOWN, Bools, Ints, PathIndex
from pipeline.source.manifest import KEEP_KEY, PARTS, ROOT_KEY, SCHEMA, Manifest, freeze_for, list_source, survey_files
from pipeline.sources import kind_of
from pipeline.sources.kind import Needs
from pipeline.storage import access
from pipeline.storage.listing import Skipped
from pipeline.storage.output_dir import OutputDir

COUNTS = "_job/counts"
ACCEPT_TOUCHED = "--accept-touched"
"""The switch of the command line; see `reopen`."""
_CHUNK = 1 << 20
_MAX_NAMED = 3


@dataclass(frozen=True)
class Reopened:
    """A manifest of which the first files are those of earlier attempts; `gone` are ordinals of files that the source
    no longer has."""

    manifest: Manifest
    gone: Ints


def reopen(needs: Needs, output: OutputDir, accept_touched: bool = False) -> Reopened:
    """The output's manifest with the source's new files behind it; a fresh one where the output has none.

    `accept_touched` takes a listed file whose time or etag differs for the same one where its size and, as far as the
    kind knows them before reading, its rows and row groups are equal: a copy of the source.

    Raises:
        ConfigError: the source cannot be listed, a file that was listed has changed, or new files have other columns.
    """
    known = read_parts(output)
    if known is None:
        return Reopened(freeze_for(needs), np.zeros(0, np.int64))
    skipped = Skipped()
    filesystem, root, listing = list_source(needs.source, skipped)
    known = replace(known, root=access.unstripped(filesystem, root), skipped=dict(skipped.counts))
    if known.files["path"].equals(listing["path"]):
        places: Ints = np.arange(listing.num_rows)
    else:
        index = PathIndex(known.files["path"])
        paths = listing["path"].combine_chunks()
        starts = range(0, len(paths), _CHUNK)
        places = np.concatenate([index.find(paths.slice(start, _CHUNK)) for start in starts])
    there = np.flatnonzero(places >= 0)
    before, now = known.files.take(pa.array(places[there])), listing.take(pa.array(there))
    if accept_touched:
        now = _with_equal_tokens(filesystem, root, needs, before, now)
    _refuse_changed(before, now, output)
    gone = np.setdiff1d(np.arange(known.num_files), places)
    new = np.flatnonzero(places < 0)
    if not len(new):
        return Reopened(known, gone)
    fresh = survey_files(filesystem, root, listing.take(pa.array(new)), needs, known)
    if not fresh.keep.equals(known.keep):
        raise ConfigError(
            f"sink.keep_columns: new files of the source have the types {_types(fresh.keep)}, and those before them "
            f"{_types(known.keep)}; give them an output of their own"
        )
    files = pa.concat_tables([known.files, fresh.files]).combine_chunks()
    return Reopened(replace(known, files=files), gone)


def write_parts(manifest: Manifest, output: OutputDir) -> Manifest:
    """Write the manifest's new files as a part behind those of all other attempts; returns the manifest of the output.

    Two attempts that were planned at the same time, while the source grew, may both have new files. Parts are created
    and never replaced; the attempt that comes second keeps the other one's part and adds only files that are not in it.

    Raises:
        ConfigError: the other attempt saw another state of the same file, or other column types.
    """
    while True:
        manifest = _behind_others(manifest, output)
        try:
            manifest.write(output)
        except FileExistsError:
            continue
        return manifest


def _behind_others(manifest: Manifest, output: OutputDir) -> Manifest:
    """The manifest with the parts that were created since it was planned, and its own new files behind them."""
    if len(output.list_files(PARTS)) <= manifest.num_parts:
        return manifest
    known = read_parts(output)
    assert known is not None
    index = PathIndex(known.files["path"])
    paths = manifest.files["path"].combine_chunks()
    starts = range(0, len(paths), _CHUNK)
    places = np.concatenate([index.find(paths.slice(start, _CHUNK)) for start in starts])
    there = np.flatnonzero(places >= 0)
    # The first files are those of the parts that both know; they were compared when this attempt was planned.
    shared = there[there >= manifest.written]
    _refuse_changed(known.files.take(pa.array(places[shared])), manifest.files.take(pa.array(shared)), output)
    new = manifest.files.take(pa.array(np.flatnonzero(places < 0)))
    if new.num_rows and not manifest.keep.equals(known.keep):
        raise ConfigError(
            f"sink.keep_columns: new files of the source have the types {_types(manifest.keep)}, and those before them "
            f"{_types(known.keep)}; give them an output of their own"
        )
    files = pa.concat_tables([known.files, new]).combine_chunks()
    return replace(known, files=files, root=manifest.root, skipped=manifest.skipped)


def _with_equal_tokens(filesystem: Any, root: str, needs: Needs, before: pa.Table, now: pa.Table) -> pa.Table:
    """The listing with the earlier tokens where only the token differs: sizes, rows and row groups are the same."""
    touched = _differ(before, now, "token") & ~_differ(before, now, "size_bytes")
    places = np.flatnonzero(touched)
    if not len(places):
        return now
    some = now.take(pa.array(places))
    found = kind_of(needs.source.kind).survey(filesystem, root, some, needs)
    tokens = now["token"].to_pylist()
    earlier = before.take(pa.array(places))
    facts = [getattr(found, name).to_pylist() for name in _FACTS]
    expected = [earlier[name].to_pylist() for name in _FACTS]
    for row, place in enumerate(places.tolist()):
        if all(column[row] == old[row] for column, old in zip(facts, expected, strict=True)):
            tokens[place] = before["token"][place].as_py()
    index = now.schema.get_field_index("token")
    return now.set_column(index, now.schema.field(index), pa.array(tokens, pa.string()))


_FACTS = ("num_samples", "row_group_rows", "row_group_bytes")
"""Facts of a surveyed file that the manifest stores."""


def _differ(before: pa.Table, now: pa.Table, name: str) -> Bools:
    if before[name].equals(now[name]):
        return np.zeros(before.num_rows, bool)
    pairs = zip(before[name].to_pylist(), now[name].to_pylist(), strict=True)
    return np.fromiter((old != new for old, new in pairs), bool, before.num_rows)


def _refuse_changed(before: pa.Table, now: pa.Table, output: OutputDir) -> None:
    resized = _differ(before, now, "size_bytes")
    changed = resized | _differ(before, now, "token")
    if changed.any():
        places = np.flatnonzero(changed)[:_MAX_NAMED].tolist()
        told = ", ".join(before["path"][place].as_py() for place in places)
        more = f" and {int(changed.sum()) - len(places):,} more" if changed.sum() > len(places) else ""
        raise ConfigError(
            f"source.path: {told}{more} changed since {output.shown()} was begun (size, etag or time); what is there "
            "was made from the old files: choose another sink.path"
            + ("" if resized.any() else f", or, where the source was only copied, go on with {ACCEPT_TOUCHED}")
        )


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def read_parts(output: OutputDir) -> Manifest | None:
    """The manifest of an output, None if there is none.

    Raises:
        ConfigError: a part is damaged.
    """
    tables: list[pa.Table] = []
    names = output.list_files(PARTS)
    for name in names:
        try:
            tables.append(pq.read_table(pa.BufferReader(output.read_bytes(f"{PARTS}/{name}"))))
        except pa.ArrowException as error:
            reason = access.reason_of(error)
            raise ConfigError(
                f"sink.path: {output.shown(f'{PARTS}/{name}')} is damaged: {reason}; move "
                f"{output.shown(PARTS)} and {output.shown(COUNTS)} away and start the job again: it lists the source "
                "anew and keeps the finished rows (changed files are not noticed then)"
            ) from None
    if not tables:
        return None
    footer = tables[0].schema.metadata
    keep = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(footer[KEEP_KEY].decode())))
    files = pa.concat_tables([table.replace_schema_metadata(None).cast(SCHEMA) for table in tables]).combine_chunks()
    return Manifest(footer[ROOT_KEY].decode(), files, keep, files.num_rows, len(names))


# --- counts known only after reading -------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoteCount:
    """Stores the number of samples of a file in a file's name, so that one listing returns all of them."""

    output: OutputDir

    def __call__(self, file: int, num_samples: int, is_broken: bool) -> None:
        """If a file is damaged after this many rows, the last of them the error row, the note contains it."""
        name = f"{COUNTS}/{file:08d}-{num_samples}{'-broken' if is_broken else ''}"
        self.output.write_bytes(name, b"-")


def broken_files(output: OutputDir) -> set[int]:
    """Ordinals of files of unknown length that were read up to damage, and never to their end."""
    notes = [name.split("-") for name in output.list_files(COUNTS)]
    whole = {note[0] for note in notes if len(note) == 2}
    return {int(note[0]) for note in notes if len(note) == 3 and note[0].isdecimal() and note[0] not in whole}


def with_counts(manifest: Manifest, output: OutputDir, forget_broken: bool = False) -> Manifest:
    """The manifest with the counts that earlier attempts have noted; `forget_broken` leaves out damaged files."""
    counts = manifest.files["num_samples"]
    if not counts.null_count:
        return manifest
    numbers = counts_of(manifest)
    found: dict[int, tuple[bool, int]] = {}
    for name in output.list_files(COUNTS):
        file, _, rest = name.partition("-")
        count, _, broken = rest.partition("-")
        if file.isdecimal() and count.isdecimal() and not (broken and forget_broken) and int(file) < len(numbers):
            note = (not broken, int(count))
            found[int(file)] = max(note, found.get(int(file), note))
    for ordinal, (_, number) in found.items():
        numbers[ordinal] = number
    place = SCHEMA.get_field_index("num_samples")
    column = pa.array(numbers, pa.int64(), mask=numbers == UNKNOWN)
    return replace(manifest, files=manifest.files.set_column(place, SCHEMA.field(place), column))


def counts_of(manifest: Manifest) -> Ints:
    """The samples of every file, `UNKNOWN` if only reading gives the number."""
    counts = manifest.files["num_samples"].fill_null(UNKNOWN)
    return np.array(counts.combine_chunks().to_numpy(zero_copy_only=False), np.int64)
