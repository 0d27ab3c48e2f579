"""Turns rows with the id of an earlier row into error rows, for sources whose ids are known only after reading (tars).

Read tasks of such sources read one file each, so a repeated id is found when all rows are in the output. The row that
comes first in the source keeps the id. The later row becomes an error row `duplicate_id` with the id `path#row`, as in
sources whose ids are known before. The outcome depends on the source only, not on the attempt that made a row. With
shards, a row of the shard that finished first keeps the id (`pipeline.output.turns`).

A kill at any point is harmless: error rows are published before the rows leave `data/`, a row in `data/` wins over an
error row of the same sample, and the next attempt repeats the missing steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cluster.partitions import IN_PROCESS, Workers
from pipeline.manifest.done_bitmap import Bools, DoneBitmap, PathIndex
from pipeline.manifest.manifest import Manifest
from pipeline.manifest.manifest_parts import read_parts, with_counts
from pipeline.manifest.span_reader import path_id
from pipeline.output.accounts import locate
from pipeline.output.files import list_published, parts, read_all_found
from pipeline.output.output_ids import repeated_samples
from pipeline.output.publishing import FOLDERS, Publisher, next_number
from pipeline.output.turns import Turns, take_turn
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir
from pipeline.storage.shard import WHOLE

CODE = "duplicate_id"
PARTS_OF_IDS = (("clip_index", "@"), ("prompt_index", "#"), ("replica", "#"))
"""Columns that distinguish the rows of one sample, and the separator before their value in a renamed row's id."""
_CLEARED = {"status": "error", "finish_reason": "error", "generated_text": ""}
_EMPTIED = ("image", "codes", "token_ids", "mean_logprob", "loop_start", "failed_checks")
_COLUMNS = ("sample_id", "source", "row_index")

SampleKey = tuple[int, int]
"""A sample's position in the source: the file's ordinal in the manifest, and the row index."""
Repeats = dict[SampleKey, str]
"""Position of each sample that repeats the id of an earlier sample → that id."""


def finalize_repeated_ids(
    publisher: Publisher, manifest: Manifest, num_rows: int, workers: Workers = IN_PROCESS
) -> int:
    """Turn rows with the id of an earlier sample into error rows, and return the number of such samples.

    Requires an output of `num_rows` rows, in which each planned sample has its rows once. A shard takes a turn,
    compares its rows with those of shards that finished before, and changes only its own rows.
    """
    output, paths = publisher.output, PathIndex(manifest.files["path"])
    turns = None if output.shard == WHOLE else take_turn(output, publisher.attempt)
    repeats = find_repeats(output, manifest, num_rows, workers, turns)
    if not repeats:
        return 0
    later = DoneBitmap(manifest.counts)
    later.add(*np.array(sorted(repeats), np.int64).T)
    taken = _Names(output)
    # Other rows of these samples may be in other files.
    doubtful = sorted(name for name, table in _tables(output, _COLUMNS) if _is_in(later, table, paths).any())
    for relative in doubtful:
        if relative.startswith(f"{DATA}/"):
            table = publisher.format.check(publisher.read_rows(relative))
            rows = renamed(table.filter(pa.array(_is_in(later, table, paths))), repeats, paths, taken)
            for part in parts(rows, publisher.rows_per_file):
                publisher.check_alone()
                publisher.publish_rows(ERRORS, next_number(output, ERRORS), publisher.format.check(part))
    for relative in doubtful:
        table = publisher.format.check(publisher.read_rows(relative))
        is_later = _is_in(later, table, paths)
        if not is_later.any():
            continue
        remaining = table.filter(pa.array(~is_later))
        if relative.startswith(f"{ERRORS}/"):
            remaining = pa.concat_tables([remaining, renamed(table.filter(pa.array(is_later)), repeats, paths, taken)])
        publisher.rewrite(relative, remaining)
    return len(repeats)


def find_repeats(
    output: OutputDir, manifest: Manifest, num_rows: int, workers: Workers = IN_PROCESS, turns: Turns | None = None
) -> Repeats:
    """Find the samples of an output or of a shard that repeat the id of an earlier sample."""
    if turns is None:
        repeats = repeated_samples(output, manifest, num_rows, workers)
    else:
        all_shards = replace(output, shard=WHOLE)
        stored = read_parts(all_shards)  # a shard that finished before may have files that this attempt does not know
        assert stored is not None
        num_rows *= len(turns.shards)  # shards have about the same number of rows
        repeats = repeated_samples(all_shards, with_counts(stored, all_shards), num_rows, workers, turns)
        repeats = repeats.filter(pa.array(turns.has(output.shard.number, repeats["rank"].to_numpy())))
    columns = (repeats[name].to_pylist() for name in ("file", "row", "sample_id"))
    return {(file, row): sample_id for file, row, sample_id in zip(*columns, strict=True)}


def renamed(rows: pa.Table, repeats: Repeats, paths: PathIndex, taken: _Names) -> pa.Table:
    """Return these rows as error rows with new ids; an error that a row already has is kept."""
    if not rows.num_rows:
        return rows
    samples = list(_sample_keys(rows, paths))
    prompt_ids = [path_id(path, row) for path, (_, row) in zip(rows["source"].to_pylist(), samples, strict=True)]
    ids = pa.array(prompt_ids, pa.string())
    for name, mark in PARTS_OF_IDS:
        if name in rows.column_names:
            part = pc.binary_join_element_wise(mark, rows[name].cast(pa.string()), "")
            ids = pc.binary_join_element_wise(ids, pc.fill_null(part, ""), "")
    is_result = pc.equal(rows["error_type"], "")
    messages = pa.array(f"the id {repeats[sample][:100]!r} is there twice" for sample in samples)
    values = {
        "sample_id": pa.array(taken.free(ids.to_pylist()), pa.string()),
        "prompt_id": pa.array(prompt_ids, pa.string()),
        "error_type": pc.if_else(is_result, CODE, rows["error_type"]),
        "error_message": pc.if_else(is_result, messages, rows["error_message"]),
        **{name: pa.repeat(value, rows.num_rows) for name, value in _CLEARED.items()},
    }
    for name in _EMPTIED:
        if name in rows.column_names:
            values[name] = pa.nulls(rows.num_rows, rows.schema.field(name).type)
    columns = [values.get(name, rows[name]) for name in rows.column_names]
    return pa.table(columns, schema=rows.schema)


class _Names:
    """Chooses new ids that no row of the output has."""

    def __init__(self, output: OutputDir) -> None:
        self._output = output
        self._given: set[str] = set()

    def free(self, wanted: list[str]) -> list[str]:
        """Return these ids; `#` is appended to an id until no row of the output has it."""
        given = list(wanted)
        while clashes := self._there(given):
            given = [sample_id + "#" if sample_id in clashes else sample_id for sample_id in given]
        self._given.update(given)
        return given

    def _there(self, ids: list[str]) -> set[str]:
        value_set = pa.array(ids, pa.string())
        clashes = self._given & set(ids)
        for _, table in _tables(self._output, ("sample_id",)):
            column = table["sample_id"]
            clashes.update(column.filter(pc.is_in(column, value_set=value_set)).to_pylist())
        return clashes


def _tables(output: OutputDir, columns: tuple[str, ...]) -> Iterator[tuple[str, pa.Table]]:
    """Read these columns of all published files, as pairs of path and table."""
    files = read_all_found(output, list_published(output, *FOLDERS), columns)
    return ((file.relative, file.table) for file in files if file.table is not None)


def _is_in(later: DoneBitmap, table: pa.Table, paths: PathIndex) -> Bools:
    [rows] = locate([table], paths)
    return later.has(rows.files, rows.rows)


def _sample_keys(table: pa.Table, paths: PathIndex) -> Iterator[SampleKey]:
    [rows] = locate([table], paths)
    return zip(rows.files.tolist(), rows.rows.tolist(), strict=True)
