"""Resumes an output of earlier attempts: reads its state, checks that it fits, and takes over.

An attempt is taken by a file that can be created once, fences older ones out (`pipeline.output.publishing`), and then
reads the output, which can no longer change under it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from configs.load import ConfigError
from pipeline.output.checksums import Verified, verify
from pipeline.output.files import Format, checksum_name
from pipeline.output.inventory import Inventory, take_inventory
from pipeline.output.publishing import FOLDERS, Press
from pipeline.source import spans
from pipeline.source.done_bitmap import DoneSet, Ints
from pipeline.source.manifest_parts import with_counts, write_parts
from pipeline.storage.output_dir import JOB, OutputDir

if TYPE_CHECKING:
    from pipeline.run.plan import JobPlan

AnyPlan = TypeVar("AnyPlan", bound="JobPlan")
MAX_DIFFERENCES = 8
SUMMARY = "summary.json"
"""Below `_job/`; the last that a job writes."""
_ABSENT = object()


@dataclass(frozen=True)
class Going:
    """Resume options of the command line: with another config than before, or with rows that failed."""

    allow_mixed: bool = False
    retry_errors: bool = False
    accept_touched: bool = False
    """Files of the source with another time or etag and the same size are the same ones (`manifest_parts.reopen`)."""
    skip_digests: bool = False
    """Compare sizes and footers of published files, and not their digests."""


AS_BEFORE = Going()


@dataclass(frozen=True)
class Earlier:
    """The state that earlier attempts left: their fingerprints, and the inventory of the output; `gone` are ordinals
    of files that the source no longer has."""

    fingerprints: Mapping[int, str]
    inventory: Inventory
    done: DoneSet
    present_ids: frozenset[str] = frozenset()
    gone: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    verified: Verified = field(default_factory=Verified)
    """Published files whose bytes are those that were written."""


# --- before anything is changed ------------------------------------------------------------------------------------


def look_back(plan: AnyPlan, gone: Ints) -> AnyPlan:
    """The plan with what earlier attempts have left; as it is where there were none.

    Raises:
        ConfigError: they ran under another config, or files that are not done have gone.
    """
    numbers = plan.output.list_attempts()
    if not numbers:
        return plan
    if not plan.going.allow_mixed:
        refuse_other_content(plan.output.read_attempt(numbers[-1]).get("content", {}), plan.content, plan.output)
    return _with_inventory(plan, fingerprints_of(plan.output), gone)


def fingerprints_of(output: OutputDir) -> dict[int, str]:
    """The config of every attempt that was taken."""
    return {number: str(output.read_attempt(number).get("config_fingerprint")) for number in output.list_attempts()}


def _with_inventory(plan: AnyPlan, fingerprints: Mapping[int, str], gone: Ints) -> AnyPlan:
    retry = plan.going.retry_errors
    manifest = with_counts(plan.manifest, plan.output, forget_broken=retry)
    verified = verify(plan.output, plan.going.skip_digests, plan.earlier.verified if plan.earlier else None)
    inventory = take_inventory(plan.output, manifest, plan.rows_per_sample, fingerprints, verified.problems)
    done = inventory.done(retry)
    earlier = Earlier(fingerprints, inventory, done, inventory.accounts.present_ids(retry), gone, verified)
    _refuse_gone(plan, earlier)
    return replace(plan, manifest=manifest, earlier=earlier)


def _refuse_gone(plan: JobPlan, earlier: Earlier) -> None:
    lost = [file for file in earlier.gone.tolist() if not earlier.done.is_whole(file)]
    if lost:
        names = ", ".join(plan.manifest.files["path"][file].as_py() for file in lost[:3])
        more = f" and {len(lost) - 3:,} more" if len(lost) > 3 else ""
        raise ConfigError(
            f"source.path: {names}{more} was there when {plan.output.shown()} was begun, is not done, and is gone; "
            "bring it back, or choose another sink.path"
        )


def refuse_other_content(before: Mapping[str, Any], now: Mapping[str, Any], output: OutputDir) -> None:
    """Refuse to mix results of two configs in one output.

    Raises:
        ConfigError: names the dotted fields that differ, with both values.
    """
    old, new = flatten(before), flatten(now)
    different = [name for name in sorted(old.keys() | new.keys()) if old.get(name, _ABSENT) != new.get(name, _ABSENT)]
    if not different:
        return
    told = [f"  {name}: {_shown(old, name)} then, {_shown(new, name)} now" for name in different[:MAX_DIFFERENCES]]
    if len(different) > MAX_DIFFERENCES:
        told.append(f"  and {len(different) - MAX_DIFFERENCES} more")
    raise ConfigError(
        "\n".join(
            [
                f"sink.path: {output.shown()} was begun with another configuration:",
                *told,
                "change it back, choose another sink.path, or mix both in one output with --allow-mixed",
            ]
        )
    )


def flatten(content: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names; lists count as values."""
    if not isinstance(content, Mapping):
        return {path: content}
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= flatten(value, f"{path}.{name}" if path else str(name))
    return found


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "absent"


# --- taking over ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begun:
    """A taken attempt: its output directory, and the next number in each folder."""

    press: Press
    next_numbers: dict[str, int]


def begin(plan: AnyPlan, record: Mapping[str, Any], rows_per_group: int | None = None) -> tuple[AnyPlan, Begun]:
    """Take the next attempt; returns the plan with the remaining work, now that no other attempt can publish.

    Raises:
        ConfigError: another job has taken the attempt.
        Fenced: a later attempt has taken over.
    """
    output = plan.output
    attempt = max(output.list_attempts(), default=0) + 1
    output.take_attempt(dict(record), attempt)
    kept = frozenset(plan.config.sink.keep_columns)
    form = Format(plan.schema, kept, plan.config.sink.compression, rows_per_group)
    press = Press(output, form, attempt, plan.fingerprint, plan.config.sink.rows_per_file)
    plan = replace(plan, manifest=write_parts(plan.manifest, output))
    output.make_folders()
    if attempt == 1:
        return plan, Begun(press, dict.fromkeys(FOLDERS, 0))
    numbers = {folder: press.fence(folder) for folder in FOLDERS}
    plan = _with_inventory(plan, fingerprints_of(output), plan.earlier.gone if plan.earlier else np.zeros(0, np.int64))
    assert plan.earlier is not None
    inventory = plan.earlier.inventory
    for one in inventory.strange:
        press.set_aside(one.relative)
    for relative in plan.earlier.verified.unreadable:
        press.remove(checksum_name(relative))  # finalizing writes it again
    for relative in inventory.spent:
        press.remove(relative)
    return plan, Begun(press, numbers)


def told(plan: JobPlan) -> list[str]:
    """Lines for the user about the earlier attempts; none for a first attempt."""
    if plan.earlier is None:
        return []
    inventory = plan.earlier.inventory
    left = spans.num_missing(plan.datasource.planned, plan.earlier.done)
    rest = "an unknown number" if left is None else f"{left:,}"
    lines = [
        f"going on: {len(plan.earlier.done):,} samples are done, {rest} missing, "
        f"{len(inventory.strange):,} files set aside"
    ]
    lines += [f"  set aside: {one.relative}: {one.problem}" for one in inventory.strange[:10]]
    return lines


def verified_lines(plan: JobPlan) -> list[str]:
    """How the files of earlier attempts were verified, and what that cost; none for a first attempt."""
    return [] if plan.earlier is None else [plan.earlier.verified.line()]


def is_complete(plan: JobPlan) -> bool:
    """Whether the output is finalized and complete, so that no attempt is needed."""
    if plan.earlier is None or plan.datasource.num_spans:
        return False
    found = plan.earlier.inventory
    at_rest = not (found.strange or found.spooled or found.spent or found.superseded)
    return at_rest and SUMMARY in plan.output.list_files(JOB)
