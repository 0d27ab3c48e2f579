"""Rows whose id an earlier row of the source has, in kinds whose ids are known only after reading (tars).

Read tasks of such kinds read one file each, so a repeated id is found when all rows are in the output. The row that
comes first in the source keeps the id. The later row becomes an error row `duplicate_id` under an id of its own
(`path#row`), as in kinds whose ids are known before. The outcome depends on the source only, not on the attempt that
made a row.

A kill at any point is harmless: error rows are published before the rows leave `data/`, a row in `data/` wins over an
error row of the same sample, and the next attempt repeats the missing steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.output.accounts import locate
from pipeline.output.files import list_published, parts, published_number, read_all_found
from pipeline.output.publishing import Press
from pipeline.source.datasource import path_id
from pipeline.source.done_bitmap import PathIndex
from pipeline.source.ids import repeated_ids
from pipeline.source.manifest import Manifest
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir

CODE = "duplicate_id"
PARTS_OF_IDS = (("clip_index", "@"), ("prompt_index", "#"), ("replica", "#"))
"""Columns that distinguish the rows of one sample, and their form in a renamed row's id."""
_CLEARED = {"status": "error", "finish_reason": "error", "generated_text": ""}
_EMPTIED = ("image", "codes", "mean_logprob")
_COLUMNS = ("sample_id", "source", "row_index")

Place = tuple[int, int]
"""A sample's place in the source: the file's ordinal in the manifest, and the row."""


@dataclass
class Repeats:
    """Later rows with the id of an earlier row: of every such sample its place, with one of the ids."""

    places: dict[Place, str] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    """The published files that hold rows of these samples."""


def settle_repeated_ids(press: Press, manifest: Manifest) -> int:
    """Turn rows with an id that an earlier row has into error rows; returns the number of such samples.

    Requires an output in which each planned sample has its rows once.

    Raises:
        Fenced: a later attempt has taken over.
        OSError: the store does not answer; the next attempt repeats the step.
    """
    paths = PathIndex(manifest.files["path"])
    found = find_repeats(press.output, paths)
    if not found.places:
        return 0
    taken = _Names(press.output)
    doubtful = sorted(found.files)
    for relative in doubtful:
        if relative.startswith(f"{DATA}/"):
            table, later = _later_rows(press, relative, paths, found)
            rows = renamed(table.filter(pa.array(later)), found, paths, taken)
            for part in parts(rows, press.rows_per_file):
                press.check_alone()
                press.publish_rows(ERRORS, _next_number(press.output, ERRORS), press.format.check(part))
    for relative in doubtful:
        table, later = _later_rows(press, relative, paths, found)
        if not later.any():
            continue
        kept = table.filter(pa.array(~later))
        if relative.startswith(f"{ERRORS}/"):
            kept = pa.concat_tables([kept, renamed(table.filter(pa.array(later)), found, paths, taken)])
        press.rewrite(relative, kept)
    return len(found.places)


def find_repeats(output: OutputDir, paths: PathIndex) -> Repeats:
    """The samples whose id an earlier sample has, by their places in the source."""
    names = [name for folder in (DATA, ERRORS) for name in list_published(output, folder)]
    columns = [one.table["sample_id"] for one in read_all_found(output, names, _COLUMNS) if one.table is not None]
    twice = repeated_ids(column.to_numpy(zero_copy_only=False) for column in columns)
    found = Repeats()
    if not twice:
        return found
    wanted = pa.array(twice, pa.string())
    by_id: dict[str, list[tuple[Place, str]]] = {}
    for one in read_all_found(output, names, _COLUMNS):
        if one.table is None:
            continue
        some = one.table.filter(pc.is_in(one.table["sample_id"], value_set=wanted))
        for own_id, place in zip(some["sample_id"].to_pylist(), _places(some, paths), strict=True):
            by_id.setdefault(own_id, []).append((place, one.relative))
    for own_id, rows in by_id.items():
        first = min(place for place, _ in rows)
        for place, _ in rows:
            if place != first:
                found.places[place] = own_id
    if found.places:  # the other rows of these samples may lie in further files
        for one in read_all_found(output, names, _COLUMNS):
            if one.table is not None and not found.places.keys().isdisjoint(_places(one.table, paths)):
                found.files.add(one.relative)
    return found


def renamed(rows: pa.Table, found: Repeats, paths: PathIndex, taken: _Names) -> pa.Table:
    """These rows as error rows with ids of their own; an error that a row has already is kept."""
    if not rows.num_rows:
        return rows
    values: dict[str, list[Any]] = {name: rows[name].to_pylist() for name in ("error_type", "error_message")}
    ids, parts_of_ids = [], {name: rows[name].to_pylist() for name, _ in PARTS_OF_IDS if name in rows.column_names}
    prompt_ids = []
    for index, place in enumerate(_places(rows, paths)):
        own = path_id(rows["source"][index].as_py(), place[1])
        prompt_ids.append(own)
        for name, mark in PARTS_OF_IDS:
            part = parts_of_ids[name][index] if name in parts_of_ids else None
            own += "" if part is None else f"{mark}{part}"
        ids.append(own)
        if not values["error_type"][index]:
            values["error_type"][index] = CODE
            values["error_message"][index] = f"the id {found.places[place][:100]!r} is there twice"
    values |= {"sample_id": taken.free(ids), "prompt_id": prompt_ids}
    values |= {name: [value] * rows.num_rows for name, value in _CLEARED.items()}
    values |= {name: [None] * rows.num_rows for name in _EMPTIED}
    for name, column in values.items():
        place_of = rows.schema.get_field_index(name)
        if place_of >= 0:
            kind = rows.schema.field(place_of)
            rows = rows.set_column(place_of, kind, pa.array(column, kind.type))
    return rows


class _Names:
    """Ids of the output, to be sure that a new one is not among them."""

    def __init__(self, output: OutputDir) -> None:
        self._output = output
        self._given: set[str] = set()

    def free(self, wanted: list[str]) -> list[str]:
        """These ids, with `#` behind those that a row of the user has."""
        given = list(wanted)
        while clashes := self._there(given):
            given = [own + "#" if own in clashes else own for own in given]
        self._given.update(given)
        return given

    def _there(self, ids: list[str]) -> set[str]:
        asked = pa.array(ids, pa.string())
        clashes = self._given & set(ids)
        names = [name for folder in (DATA, ERRORS) for name in list_published(self._output, folder)]
        for one in read_all_found(self._output, names, ("sample_id",)):
            if one.table is not None:
                column = one.table["sample_id"]
                clashes.update(column.filter(pc.is_in(column, value_set=asked)).to_pylist())
        return clashes


def _later_rows(
    press: Press, relative: str, paths: PathIndex, found: Repeats
) -> tuple[pa.Table, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    table = press.format.check(pq.read_table(pa.BufferReader(press.output.read_bytes(relative))))
    return table, np.fromiter((place in found.places for place in _places(table, paths)), bool, table.num_rows)


def _places(table: pa.Table, paths: PathIndex) -> Iterator[Place]:
    [rows] = locate([table], paths)
    return zip(rows.files.tolist(), rows.rows.tolist(), strict=True)


def _next_number(output: OutputDir, folder: str) -> int:
    numbers = [published_number(name) for name in list_published(output, folder)]
    return max((number + 1 for number in numbers if number is not None), default=0)
