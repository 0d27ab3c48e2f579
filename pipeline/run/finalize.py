"""Finalizes an output at the end of an attempt, and checks that every planned sample has its rows.

In a finalized output `data/` has each row at most once, an error row exists only for a row without a result, and the
spool is empty. The state is read from the output, so the next attempt completes an interrupted finalization. If a later
attempt has taken over, `Fenced` is raised and nothing more is changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from pipeline.cluster.partitions import Workers
from pipeline.formats import kind_of
from pipeline.manifest import spans
from pipeline.manifest.manifest import Manifest
from pipeline.manifest.manifest_parts import with_counts
from pipeline.output.checksums import is_of, read_note
from pipeline.output.files import CHECKSUMS, list_published, note_checksum, write_checksum
from pipeline.output.inventory import Inventory, take_inventory
from pipeline.output.publishing import FOLDERS, SET_ASIDE, Publisher
from pipeline.run.job_plan import JobPlan
from pipeline.run.repeated_ids import finalize_repeated_ids
from pipeline.storage.digests import OTHER_BYTES, Digest
from pipeline.storage.output_dir import DATA, ERRORS
from pipeline.storage.parquet_files import num_rows_of


def finalize(
    plan: JobPlan, publisher: Publisher, fingerprints: Mapping[int, str], next_numbers: Mapping[str, int]
) -> Inventory:
    """Finalize the output and return its inventory; raise RuntimeError if rows are missing or occur twice."""
    output = publisher.output
    publisher.check_alone()
    if not next_numbers[DATA]:  # without any result, `data/` gets an empty file, so that readers find a schema
        publisher.publish_rows(DATA, 0, publisher.format.schema.empty_table())
    manifest = with_counts(plan.manifest, output)
    with Workers(plan.config.job) as workers:
        return _finalize(plan, publisher, manifest, fingerprints, next_numbers[ERRORS], workers)


def _finalize(
    plan: JobPlan,
    publisher: Publisher,
    manifest: Manifest,
    fingerprints: Mapping[int, str],
    next_error_number: int,
    workers: Workers,
) -> Inventory:
    def take(known: Inventory | None) -> Inventory:
        return take_inventory(
            publisher.output, manifest, plan.rows_per_sample, fingerprints, known=known, workers=workers
        )

    inventory = take(plan.prior.inventory if plan.prior else None)
    for relative in inventory.spent:
        publisher.remove(relative)
    # Older attempts spooled these files after this one took over; it has computed their rows again.
    for file in inventory.spooled:
        publisher.set_aside(file.relative)
    if inventory.spooled:  # rows that were set aside must not count as done
        inventory = take(inventory)
    for strange in inventory.strange:
        publisher.set_aside(strange.relative)
    complete_checksums(publisher, inventory)
    drop_superseded(publisher, inventory, next_error_number)
    check_accounted(plan, inventory)
    if may_repeat_ids(plan):
        finalize_repeated_ids(publisher, manifest, sum(inventory.num_rows.values()), workers)
    publisher.forget_spool()
    return inventory


def drop_superseded(publisher: Publisher, inventory: Inventory, next_number: int) -> None:
    """Remove superseded error rows from `errors/`: publish the other rows of a file again, then empty the file.

    After a kill in between, rows are in both files, and the next inventory counts those of the newer file.
    """
    for relative, mask in inventory.superseded.items():
        table = publisher.read_rows(relative)
        if table.num_rows != len(mask):  # published files change only when a later attempt empties them
            publisher.check_alone()
            raise OSError(f"{relative} holds {table.num_rows} rows and held {len(mask)} before")
        if not mask.all():
            next_number = publisher.publish_rows(ERRORS, next_number, table.filter(pa.array(~mask))) + 1
        publisher.empty(relative)


def complete_checksums(publisher: Publisher, inventory: Inventory) -> None:
    """Write checksum notes that are missing, or outdated for emptied files, because a writer was killed before it did;
    RuntimeError for a file whose digest is not recorded."""
    output = publisher.output
    noted = set(output.list_files(CHECKSUMS))
    names = [
        name for name in list_published(output, *FOLDERS) if f"{name}.json" not in noted or name in inventory.empty
    ]
    recorded = output.digests() if names else {}
    for relative in names:
        data = output.read_bytes(relative)
        if (note := read_note(output, relative)) and is_of(note, data):
            continue
        if Digest.of(data) not in recorded.get(relative, ()):
            raise RuntimeError(f"{output.shown(relative)}: {OTHER_BYTES}; {SET_ASIDE}")
        num_rows = num_rows_of(data)
        if not note_checksum(output, relative, data, num_rows):
            publisher.check_alone()
            write_checksum(output, relative, data, num_rows)


def check_accounted(plan: JobPlan, inventory: Inventory) -> None:
    """Raise RuntimeError if the output lacks a planned sample or has a row twice."""
    where = plan.output.shown()
    if inventory.doubled:
        names = [name for ids in inventory.doubled.values() for name in ids]
        raise RuntimeError(f"{len(names)} rows are twice in {where}: {', '.join(names[:5])}")
    missing = spans.num_missing(plan.datasource.planned, inventory.accounts.done())
    if missing is None:
        raise RuntimeError(f"some files were not read to their end; start the job again to go on with {where}")
    if missing:
        raise RuntimeError(f"{missing} samples are missing in {where}; start the job again to go on")


def may_repeat_ids(plan: JobPlan) -> bool:
    """Return whether rows may have equal ids that planning did not find: ids in tars are known only after reading."""
    source = plan.config.source
    return source.id_column is not None and not kind_of(source.kind).has_cheap_ids
