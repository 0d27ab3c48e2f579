"""The end of an attempt: the output brought to rest, and every planned sample accounted for.

At rest `data/` holds a row at most once, an error row stands for a row without a result, and the spool is empty. All of
it is found by looking, so that the next attempt finishes what this one did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import spans
from pipeline.inventory import Inventory, take_inventory
from pipeline.layout import DATA, ERRORS, OutputDir
from pipeline.manifest_parts import with_counts
from pipeline.publishing import Press
from pipeline.repeated_ids import settle_repeated_ids
from pipeline.result_files import (
    CHECKSUMS,
    list_published,
    published_name,
    write_checksum,
)
from pipeline.sources import kind_of

if TYPE_CHECKING:
    from pipeline.plan import JobPlan


def settle(plan: JobPlan, press: Press, fingerprints: Mapping[int, str], next_numbers: Mapping[str, int]) -> Inventory:
    """Bring the output to rest and check that nothing is missing or there twice.

    Raises:
        RuntimeError: something is.
    """
    output = press.output
    if not next_numbers[DATA]:  # without one good row: readable all the same, and empty
        output.create_bytes(
            published_name(DATA, 0),
            press.format.serialise(press.format.schema.empty_table(), press.attempt, press.fingerprint),
        )
    manifest = with_counts(plan.manifest, output)
    found = take_inventory(output, manifest, plan.rows_per_sample, fingerprints)
    for relative, mask in found.superseded.items():
        table = pq.read_table(pa.BufferReader(output.read_bytes(relative)))
        press.rewrite(relative, table.filter(pa.array(~mask)))
    for one in found.spooled:  # what older attempts spooled after this one had looked; its rows have been made again
        output.set_aside(one.relative)
    for relative in found.spent:
        output.remove(relative)
    for strange in found.strange:
        output.set_aside(strange.relative)
    complete_checksums(output)
    check_accounted(plan, found)
    if may_repeat_ids(plan):
        settle_repeated_ids(press, manifest)
    return found


def complete_checksums(output: OutputDir) -> None:
    """Note the checksums of published files that lack one: whoever wrote them was killed before."""
    noted = set(output.list_files(CHECKSUMS))
    for folder in (DATA, ERRORS):
        for relative in list_published(output, folder):
            if f"{relative}.json" not in noted:
                data = output.read_bytes(relative)
                write_checksum(output, relative, data, pq.read_metadata(pa.BufferReader(data)).num_rows)


def check_accounted(plan: JobPlan, found: Inventory) -> None:
    """Refuse to call a job done whose output lacks a planned row or holds one twice.

    Raises:
        RuntimeError: says how many, and names the first ones.
    """
    where = plan.output.shown()
    if found.doubled:
        names = [name for ids in found.doubled.values() for name in ids]
        raise RuntimeError(f"{len(names)} rows are twice in {where}: {', '.join(names[:5])}")
    missing = spans.num_missing(plan.datasource.planned, found.done())
    if missing is None:
        raise RuntimeError(f"some files were not read to their end; start the job again to go on with {where}")
    if missing:
        raise RuntimeError(f"{missing} samples are missing in {where}; start the job again to go on")


def may_repeat_ids(plan: JobPlan) -> bool:
    """Whether rows can have equal ids that planning did not find: ids of tars are known only after reading, and files
    that two attempts have added at the same time were not compared with each other."""
    source, manifest = plan.config.source, plan.manifest
    if source.id_column is None:
        return False
    num_parts = manifest.num_parts + (manifest.written < manifest.num_files)
    return not kind_of(source.kind).tells_ids or (source.check_ids and num_parts > 1)
