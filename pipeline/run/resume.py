"""Resumes an output of earlier attempts: reads its state, checks that it matches the job, and starts the next attempt.

An attempt starts by creating its record, a file that only one process can create. It fences older attempts out
(`pipeline.output.publishing`), and then reads the output, which can no longer change.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from configs.load import ConfigError
from pipeline.cluster.partitions import IN_PROCESS, Workers
from pipeline.output.checksums import Verified, verify
from pipeline.output.files import Format, checksum_name
from pipeline.output.inventory import Inventory, take_inventory
from pipeline.output.publishing import FOLDERS, Publisher
from pipeline.reports.outcome import Verdict, judge_json
from pipeline.source import spans
from pipeline.source.done_bitmap import DoneBitmap, Ints
from pipeline.source.manifest_parts import with_counts, write_parts
from pipeline.source.shards import rows_of
from pipeline.storage import access
from pipeline.storage.output_dir import CONTENT, JOB, OutputDir, as_json
from pipeline.storage.shard import WHOLE

if TYPE_CHECKING:
    from pipeline.run.plan import JobPlan

AnyPlan = TypeVar("AnyPlan", bound="JobPlan")
MAX_DIFFERENCES = 8
SUMMARY = "summary.json"
"""Name of the last file that a job writes, below `_job/`."""


@dataclass(frozen=True)
class ResumeOptions:
    """Resume options of the command line."""

    allow_mixed: bool = False
    retry_errors: bool = False
    accept_touched: bool = False
    """Accept source files whose time or etag has changed if their size has not (`manifest_parts.reopen`)."""
    skip_digests: bool = False
    """Compare only sizes and footers of published files."""


DEFAULT_RESUME = ResumeOptions()


@dataclass(frozen=True)
class Earlier:
    """State of the output after earlier attempts; `gone` are the ordinals of files that the source no longer has."""

    inventory: Inventory
    done: DoneBitmap
    present_ids: frozenset[str] = frozenset()
    gone: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    verified: Verified = field(default_factory=Verified)
    """Result of the comparison of published files with their checksums."""


def read_earlier(plan: AnyPlan, gone: Ints, workers: Workers = IN_PROCESS) -> AnyPlan:
    """Add the state of earlier attempts to the plan; raise ConfigError for another config, lost unfinished files, or an
    output that cannot be read."""
    with access.refusals("sink.path", plan.output.url):
        numbers = plan.output.list_attempts()
        if not numbers:
            _refuse_content_of_other_shards(plan)
            return plan
        if not plan.resume.allow_mixed:
            refuse_other_content(plan.output.read_attempt(numbers[-1]).get("content", {}), plan.content, plan.output)
        return _with_inventory(plan, gone, workers)


def _refuse_content_of_other_shards(plan: JobPlan) -> None:
    if plan.output.shard == WHOLE or plan.resume.allow_mixed:
        return
    with contextlib.suppress(FileNotFoundError):
        refuse_other_content(json.loads(plan.output.read_bytes(CONTENT)), plan.content, plan.output)


def fingerprints_of(output: OutputDir) -> dict[int, str]:
    """Return the config fingerprint of every attempt, by its number."""
    return {number: str(output.read_attempt(number).get("config_fingerprint")) for number in output.list_attempts()}


def _with_inventory(plan: AnyPlan, gone: Ints, workers: Workers) -> AnyPlan:
    retry, shard = plan.resume.retry_errors, plan.output.shard.number
    manifest = with_counts(plan.manifest, plan.output, forget_broken=retry)
    verified = verify(plan.output, plan.resume.skip_digests, plan.earlier.verified if plan.earlier else None)
    fingerprints = fingerprints_of(plan.output)
    known = plan.earlier.inventory if plan.earlier else None
    inventory = take_inventory(
        plan.output, manifest, plan.rows_per_sample, fingerprints, verified.problems, known, workers
    )
    done = inventory.accounts.done(retry)
    lost = [file for file in gone.tolist() if not done.is_complete(file, *rows_of(manifest.cuts, shard, file))]
    if lost:
        names = ", ".join(plan.manifest.files["path"][file].as_py() for file in lost[:3])
        more = f" and {len(lost) - 3:,} more" if len(lost) > 3 else ""
        raise ConfigError(
            f"source.path: {names}{more} was there when {plan.output.shown()} was begun, is not done, and is gone; "
            "bring it back, or choose another sink.path"
        )
    earlier = Earlier(inventory, done, inventory.accounts.present_ids(retry), gone, verified)
    return replace(plan, manifest=manifest, earlier=earlier)


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
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= flatten(value, f"{path}.{name}" if path else str(name))
    return found


@dataclass(frozen=True)
class Begun:
    """A started attempt: its publisher, and the next free file number of each folder."""

    publisher: Publisher
    next_numbers: dict[str, int]


def begin(plan: AnyPlan, record: Mapping[str, Any], rows_per_group: int | None = None) -> tuple[AnyPlan, Begun]:
    """Start the next attempt, fence older ones out, and return the plan with the remaining work.

    Raises:
        ConfigError: another job has taken the attempt.
        Fenced: a later attempt has taken over.
    """
    output = plan.output
    attempt = max(output.list_attempts(), default=0) + 1
    if output.shard != WHOLE:
        try:
            output.create_bytes(CONTENT, as_json(plan.content))
        except FileExistsError:
            _refuse_content_of_other_shards(plan)
    output.take_attempt(dict(record), attempt)
    kept = frozenset(plan.config.sink.keep_columns)
    form = Format(plan.schema, kept, plan.config.sink.compression, rows_per_group)
    publisher = Publisher(output, form, attempt, plan.fingerprint, plan.config.sink.rows_per_file)
    with Workers(plan.config.job) as workers:
        plan = replace(plan, manifest=write_parts(plan.manifest, output, plan.config.source, workers))
        output.make_folders()
        if attempt == 1:
            return plan, Begun(publisher, dict.fromkeys(FOLDERS, 0))
        numbers = {folder: publisher.fence(folder) for folder in FOLDERS}
        gone = plan.earlier.gone if plan.earlier else np.zeros(0, np.int64)
        plan = _with_inventory(plan, gone, workers)
    assert plan.earlier is not None
    inventory = plan.earlier.inventory
    for one in inventory.strange:
        publisher.set_aside(one.relative)
    unreadable = map(checksum_name, plan.earlier.verified.unreadable)  # finalizing writes them again
    for relative in (*unreadable, *inventory.spent):
        publisher.remove(relative)
    return plan, Begun(publisher, numbers)


def resume_lines(plan: JobPlan) -> list[str]:
    """Return lines for the user about earlier attempts and the check of their files; none for a first attempt."""
    if plan.earlier is None:
        return []
    strange = plan.earlier.inventory.strange
    left = spans.num_missing(plan.datasource.planned, plan.earlier.done)
    rest = "an unknown number" if left is None else f"{left:,}"
    return [
        f"resuming: {len(plan.earlier.done):,} samples are done, {rest} missing, {len(strange):,} files set aside",
        *(f"  set aside: {one.relative}: {one.problem}" for one in strange[:10]),
        plan.earlier.verified.line(),
    ]


def is_complete(plan: JobPlan) -> bool:
    """Return whether the output is finalized and complete, so that no attempt is needed."""
    if plan.earlier is None or plan.datasource.num_spans:
        return False
    found = plan.earlier.inventory
    at_rest = not (found.strange or found.spooled or found.spent or found.superseded)
    with access.refusals("sink.path", plan.output.url):
        return at_rest and bool(read_summary(plan.output))


def read_summary(output: OutputDir) -> dict[str, Any]:
    """Read the summary that the newest attempt has written, which it does last; empty if it has not, or if it is
    damaged."""
    try:
        summary = json.loads(output.read_bytes(f"{JOB}/{SUMMARY}"))
        is_newest = summary["attempt"] == output.list_attempts()[-1]
        counts = (summary["num_samples"], *summary["errors_by_type"].values())
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return summary if is_newest and all(isinstance(count, int) for count in counts) else {}


def verdict_of(plan: JobPlan) -> Verdict:
    """Return the verdict over a complete output; errors of earlier attempts count as well."""
    return judge_json(read_summary(plan.output), plan.config.job.max_error_share)
