"""Resumes an output of earlier attempts: reads its state, checks that it matches the job, and starts the next attempt.

An attempt starts by creating its record, a file that only one process can create. It fences older attempts out
(`pipeline.output.publishing`), and then reads the output, which can no longer change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from configs.load import ConfigError
from files.plurals import counted
from pipeline.cluster.partitions import IN_PROCESS, Workers
from pipeline.manifest import spans
from pipeline.manifest.done_bitmap import DoneBitmap, Ints
from pipeline.manifest.manifest import Manifest
from pipeline.manifest.manifest_parts import missing_files, with_counts, write_parts
from pipeline.manifest.shards import plan_shard, rows_of
from pipeline.output.checksums import verify
from pipeline.output.files import Format, checksum_name
from pipeline.output.inventory import Inventory, take_inventory
from pipeline.output.publishing import FOLDERS, Publisher
from pipeline.reports.outcome import JobVerdict, judge_json
from pipeline.reports.summary import count
from pipeline.run.job_plan import AnyPlan, JobPlan, PriorState
from pipeline.storage import access
from pipeline.storage.damage import DamagedFile
from pipeline.storage.output_dir import ATTEMPTS, CONTENT, JOB, OutputDir, as_json
from pipeline.storage.shard import WHOLE

MAX_DIFFERENCES = 8
MAX_NAMED_IDS = 5
WHOLE_FILE_ROWS, WHOLE_FILE_BYTES = 1_000_000, 1 << 60
"""Sizes of spans with which samples are only counted."""
SUMMARY = "summary.json"
"""Name of the last file that a job writes, below `_job/`."""


def read_prior_state(plan: AnyPlan, gone: Ints, workers: Workers = IN_PROCESS) -> AnyPlan:
    """Add the state of earlier attempts to the plan; raise ConfigError for another config, lost unfinished files, or an
    output that cannot be read."""
    with access.refusals("sink.path", plan.output.url):
        plan.output.refuse_links()
        numbers = plan.output.list_attempts()
        if not numbers:
            _refuse_content_of_other_shards(plan)
            _refuse_lost(plan, gone)
            return plan
        if not plan.resume.allow_mixed:
            record = plan.output.read_attempt(numbers[-1], plan.output.digests(ATTEMPTS))
            refuse_other_content(record.get("content") or {}, plan.identity.content, plan.output)
        return _with_inventory(plan, gone, workers)


def read_content(output: OutputDir) -> dict[str, Any]:
    """Read the settings that all shards share; DamagedFile if they are damaged, FileNotFoundError if missing."""
    advice = "remove it; the next attempt of a shard writes it again"
    content = output.read_json(CONTENT, advice)
    if not isinstance(content, dict):
        raise DamagedFile(output.shown(CONTENT), CONTENT, "it is no JSON object", advice)
    return content


def _refuse_content_of_other_shards(plan: JobPlan) -> None:
    if plan.output.shard == WHOLE or plan.resume.allow_mixed:
        return
    with contextlib.suppress(FileNotFoundError):
        refuse_other_content(read_content(plan.output), plan.identity.content, plan.output)


def fingerprints_of(output: OutputDir) -> dict[int, str]:
    """Return the config fingerprint of every attempt, by its number; DamagedFile for a damaged record."""
    numbers, recorded = output.list_attempts(), output.digests(ATTEMPTS)
    records = {number: output.read_attempt(number, recorded) for number in numbers}
    return {number: str(record.get("config_fingerprint")) for number, record in records.items()}


def _with_inventory(plan: AnyPlan, gone: Ints, workers: Workers) -> AnyPlan:
    retry = plan.resume.retry_errors
    manifest = with_counts(plan.manifest, plan.output, forget_broken=retry)
    verified = verify(plan.output, plan.resume.skip_digests, plan.prior.verified if plan.prior else None)
    fingerprints = fingerprints_of(plan.output)
    known = plan.prior.inventory if plan.prior else None

    def take(damaged: Mapping[str, str], known: Inventory | None) -> Inventory:
        rows, unrecorded = plan.rows_per_sample, verified.unrecorded
        return take_inventory(plan.output, manifest, rows, fingerprints, damaged, known, workers, unrecorded)

    inventory = take(verified.problems, known)
    if inventory.doubled:  # their other rows are made again
        doubled = {name: doubled_rows(ids) for name, ids in inventory.doubled.items()}
        inventory = take(verified.problems | doubled, None)
    done = inventory.accounts.done(retry)
    _refuse_lost(plan, gone, done)
    prior = PriorState(inventory, done, inventory.accounts.present_ids(retry), gone, verified)
    return replace(plan, manifest=manifest, prior=prior)


def doubled_rows(ids: Sequence[str]) -> str:
    """Return the problem of a published file with rows that were published before."""
    return f"{len(ids):,} rows are in another file too, or twice in it: {', '.join(ids[:MAX_NAMED_IDS])}"


def _refuse_lost(plan: JobPlan, gone: Ints, done: DoneBitmap | None = None) -> None:
    """Raise ConfigError if files of the shard are `gone` whose samples are not all `done` (None: none are)."""
    if not len(gone):
        return
    done = DoneBitmap(plan.manifest.counts) if done is None else done
    cuts, shard = plan.manifest.cuts, plan.output.shard.number
    lost = [file for file in gone.tolist() if not _is_done(done, file, *rows_of(cuts, shard, file))]
    if lost:
        names = ", ".join(plan.manifest.files["path"][file].as_py() for file in lost[:3])
        more = f" and {len(lost) - 3:,} more" if len(lost) > 3 else ""
        raise ConfigError(
            f"source.path: {names}{more} was there when {plan.output.shown()} was begun, is not done, and is gone; "
            "bring it back, or choose another sink.path"
        )


def _really_gone(manifest: Manifest, missing: Ints) -> Ints:
    """Return those of the files `missing` from a listing that do not exist; the others appeared after it."""
    filesystem, root = access.open_url(manifest.root, "source.path")
    paths = manifest.files["path"].take(pa.array(missing)).to_pylist()
    is_gone = [not filesystem.exists(access.join(root, path)) for path in paths]
    return np.asarray(missing[np.array(is_gone, bool)])


def _is_done(done: DoneBitmap, file: int, start: int, stop: int | None) -> bool:
    return start == stop or done.is_complete(file, start, stop)


def refuse_other_content(before: Mapping[str, Any], now: Mapping[str, Any], output: OutputDir) -> None:
    """Raise ConfigError if two configs would mix results in one output; the message names the fields that differ."""
    old, new = flatten(before), flatten(now)
    changes = [
        f"  {name}: {_shown(old, name)} then, {_shown(new, name)} now"
        for name in sorted(old.keys() | new.keys())
        if (name in old, old.get(name)) != (name in new, new.get(name))
    ]
    if not changes:
        return
    more = [f"  and {len(changes) - MAX_DIFFERENCES} more"] if len(changes) > MAX_DIFFERENCES else []
    lines = [
        f"sink.path: {output.shown()} was begun with another configuration:",
        *changes[:MAX_DIFFERENCES],
        *more,
        "change it back, choose another sink.path, or mix both in one output with --allow-mixed",
    ]
    raise ConfigError("\n".join(lines))


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "absent"


def flatten(content: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested mappings to values by dotted name; lists count as values."""
    if not isinstance(content, Mapping):
        return {path: content}
    flat: dict[str, Any] = {}
    for name, value in content.items():
        flat |= flatten(value, f"{path}.{name}" if path else str(name))
    return flat


@dataclass(frozen=True)
class AttemptState:
    """A started attempt: its publisher, and the next free file number of each folder."""

    publisher: Publisher
    next_numbers: dict[str, int]


def begin(plan: AnyPlan, record: Mapping[str, Any], rows_per_group: int | None = None) -> tuple[AnyPlan, AttemptState]:
    """Start the next attempt, fence older ones out, and return the plan with the remaining work.

    Raises:
        ConfigError: another job has taken the attempt, or lists files that the source no longer has.
        Fenced: a later attempt has taken over.
    """
    output = plan.output
    output.refuse_links()
    attempt = max(output.list_attempts(), default=0) + 1
    if output.shard != WHOLE:
        try:
            output.create_recorded(CONTENT, as_json(plan.identity.content))
        except FileExistsError:
            _refuse_content_of_other_shards(plan)
    output.take_attempt(dict(record), attempt)
    output.make_folders()
    output = output.pinned()
    kept_columns = frozenset(plan.config.sink.keep_columns)
    form = Format(plan.schema, kept_columns, plan.config.sink.compression, rows_per_group)
    publisher = Publisher(output, form, attempt, plan.identity.fingerprint, plan.config.sink.rows_per_file)
    with Workers(plan.config.job) as workers:
        stored = write_parts(plan.manifest, output, plan.config.source, workers)
        gone = plan.prior.gone if plan.prior else np.zeros(0, np.int64)
        # Files of parts that other attempts wrote after this one was planned.
        gone = np.union1d(gone, _really_gone(stored, missing_files(plan.manifest, stored)))
        plan = replace(plan, manifest=stored, output=output)
        if attempt == 1:
            _refuse_lost(plan, gone)
            return plan, AttemptState(publisher, dict.fromkeys(FOLDERS, 0))
        numbers = {folder: publisher.fence(folder) for folder in FOLDERS}
        plan = _with_inventory(plan, gone, workers)
    assert plan.prior is not None
    inventory = plan.prior.inventory
    for file in inventory.strange:
        publisher.set_aside(file.relative)
    unreadable = map(checksum_name, plan.prior.verified.unreadable)  # finalizing writes them again
    for relative in (*unreadable, *inventory.spent):
        publisher.remove(relative)
    return plan, AttemptState(publisher, numbers)


def resume_lines(plan: JobPlan) -> list[str]:
    """Return lines for the user about earlier attempts and the check of their files; none for a first attempt."""
    if plan.prior is None:
        return []
    strange = plan.prior.inventory.strange
    num_missing, num_done = spans.num_missing(plan.datasource.planned, plan.prior.done), len(plan.prior.done)
    rest = "an unknown number" if num_missing is None else f"{num_missing:,}"
    return [
        f"resuming: {counted(num_done, 'sample')} {'is' if num_done == 1 else 'are'} done, {rest} missing, "
        f"{counted(len(strange), 'file')} set aside",
        *(access.printable(f"  set aside: {file.relative}: {file.problem}") for file in strange[:10]),
        plan.prior.verified.line(),
    ]


def limit_text(plan: JobPlan) -> str:
    """Return how many samples of the job or shard a limit leaves out; empty if none."""
    if plan.limit is None:
        return ""
    manifest = with_counts(plan.manifest, plan.output)
    shard, planned = plan.output.shard, plan.datasource.planned
    unlimited = plan_shard(manifest.files, manifest.cuts, shard.number, WHOLE_FILE_ROWS, WHOLE_FILE_BYTES)
    return limited(planned, unlimited, manifest.counts, plan.limit)


def limited(planned: spans.Spans, unlimited: spans.Spans, counts: Ints, limit: int) -> str:
    """Return how many samples of `unlimited` are not planned because of a limit; empty if none."""
    num_planned, num_samples = spans.num_samples(planned, counts), spans.num_samples(unlimited, counts)
    if num_samples is not None and num_planned == num_samples:
        return ""
    most = f"{limit:,}" if num_planned is None else f"{num_planned:,}"
    rest = "an unknown number of" if num_samples is None else f"{num_samples:,}"
    return f"{most} of {rest} samples are planned (--limit {limit}); the same command without --limit runs the others"


def is_complete(plan: JobPlan) -> bool:
    """Return whether the output is finalized and has all planned samples, so that no attempt is needed."""
    if plan.prior is None or plan.datasource.num_spans:
        return False
    inventory, verified = plan.prior.inventory, plan.prior.verified
    at_rest = not (inventory.strange or inventory.spooled or inventory.spent or inventory.superseded)
    has_notes = not (verified.unreadable or verified.unnoted)
    with access.refusals("sink.path", plan.output.url):
        return at_rest and has_notes and bool(read_summary(plan.output))


def read_summary(output: OutputDir) -> dict[str, Any]:
    """Read the summary of the newest attempt, which it writes last; empty if it has not, or if the file is damaged."""
    try:
        summary = output.read_json(f"{JOB}/{SUMMARY}")
    except (FileNotFoundError, DamagedFile):
        return {}
    is_newest = isinstance(summary, dict) and summary.get("attempt") == output.list_attempts()[-1]
    return summary if is_newest else {}


def verdict_of(plan: JobPlan) -> JobVerdict:
    """Return the verdict over a complete output, by its summary, or by its rows if the summary does not count them."""
    max_error_share = plan.config.job.max_error_share
    try:
        return judge_json(read_summary(plan.output), max_error_share)
    except (KeyError, TypeError, AttributeError):
        return count(plan.output, plan.empty_summary()).judge(max_error_share)
