"""Summarises a job: totals counted from its output, for the terminal and `_job/summary.json`. The acceptance length is
1 + accepted drafts / verify steps, the bonus token included (as in vLLM; SpecVLM, LVSpec and SAGE exclude it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial, reduce
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from actors.serving.engine_thread import Waits
from configs.acceptance import AuditConfig
from files.plurals import counted
from pipeline.cluster.partitions import IN_PROCESS, Workers
from pipeline.media.video import parts
from pipeline.output.files import partitions_of
from pipeline.reports import loss, outcome
from pipeline.reports.chosen_depths import ChosenDepths, add_counts
from pipeline.reports.loss import Losses
from pipeline.reports.outcome import NO_VERDICT, JobVerdict
from pipeline.reports.result_tables import (
    READ_FILE_S,
    added,
    counts,
    histogram,
    list_tables,
    read_tables,
    total,
)
from pipeline.reports.trials import listing, trial_lines
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir

COLUMNS = ("attempt", "method", "status", "error_type", "num_generated_tokens", "telemetry")
PLACES = ("clip_index", "prompt_index")
"""Columns with the position of a row among the rows of its sample; null if the sample has one row."""
MESSAGE = "error_message"
PARTIAL = "partial_video"
FAILED_CHECKS, RETRY = "failed_checks", "retry_index"
FINISH_REASON = "finish_reason"
REPLICA = "replica"
OPTIONAL = (PARTIAL, REPLICA, FAILED_CHECKS, RETRY, FINISH_REASON, loss.LOSS)
CONVENTION = "1 + accepted drafts / steps, the bonus token included"
BAR_WIDTH = 30
MAX_EXAMPLES, MAX_EXAMPLE_CHARS = 64, 300
MAX_DRIFTS_SHOWN = 8
NO_WAITS = Waits()
DERIVED = (
    *("num_errors", "samples_per_s", "tokens_per_s", "tokens_per_engine_s"),
    *("mean_acceptance_length", "acceptance_by_position"),
)
SUMMED = ("wall_s", "num_samples", "num_inputs", "num_generated_tokens", "num_made", "num_tokens_made")
CHECKED = ("num_failed_checks", "num_looped", "num_retried")
TELEMETRY_SUMS = {
    "num_steps": "num_spec_steps",
    "num_draft_tokens": "num_draft_tokens",
    "num_accepted_draft_tokens": "num_accepted_draft_tokens",
    "num_degraded": "degraded",
    "prefill_ms": "prefill_ms",
    "draft_ms": "draft_ms",
    "verify_ms": "verify_ms",
}
"""Fields of the summary that sum a field of the rows' telemetry."""


@dataclass
class Summary:
    """Totals of one job over all attempts; rates per wall time count only rows of `attempt`, the latest one.
    `prefill_ms`, `draft_ms` and `verify_ms` sum the rows' shares of engine time."""

    job_id: str
    method: str
    verify_mode: str
    wall_s: float
    waits: Waits = NO_WAITS
    num_samples: int = 0
    num_inputs: int = 0
    """Input samples; one sample may have several rows."""
    by_status: dict[str, int] = field(default_factory=dict)
    errors_by_type: dict[str, int] = field(default_factory=dict)
    error_examples: dict[str, str] = field(default_factory=dict)
    """The message of one row by error code."""
    partial_videos: dict[str, int] = field(default_factory=dict)
    """Rows with results that show a part of their videos, by reason; a row may have several."""
    failed_checks: dict[str, int] = field(default_factory=dict)
    """Rows with results by the check that they fail; a row may fail several."""
    num_failed_checks: int = 0
    """Rows with results that fail a check."""
    num_looped: int = 0
    """Rows that `sampling.stop_loops` ended."""
    num_retried: int = 0
    """Rows whose text is that of a further attempt (`retry`)."""
    by_method: dict[str, int] = field(default_factory=dict)
    """Rows by the method that decoded them; several if `method.auto` tried several."""
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_degraded: int = 0
    """Rows that were decoded without their drafter, because it failed on them."""
    acceptance_histogram: list[int] = field(default_factory=list)
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    depths: ChosenDepths = field(default_factory=ChosenDepths)
    limited: str = ""
    """Number of samples that `--limit` leaves out, as text."""
    skipped_files: str = ""
    """Source files that were not read, as text."""
    num_broken_files: int = 0
    """Damaged or truncated files, whose number of rows is unknown."""
    attempt: int = 0
    audit: AuditConfig | None = None
    losses: Losses = field(default_factory=Losses)
    """Losses of the audited rows."""
    num_made: int = 0
    """Rows with a result that this attempt computed."""
    num_tokens_made: int = 0
    max_rows_in_flight: int = 0
    drifts: list[str] = field(default_factory=list)
    """Drops and recoveries of the acceptance length in this attempt, as text (`pipeline.reports.drift`)."""
    max_unsaved_seconds: float = 0.0
    """A kill loses at most `max_rows_in_flight` unfinished rows, and the rows finished in these last seconds."""
    command_s: float = 0.0
    """Seconds from the start of the command to its summary, which only the terminal shows; 0 if unknown."""
    verdict: JobVerdict = NO_VERDICT
    """The outcome of a finished job (`judge`)."""

    @property
    def samples_per_s(self) -> float:
        """Results of this attempt per second of wall time."""
        return self.num_made / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of this attempt per second of wall time."""
        return self.num_tokens_made / self.wall_s

    @property
    def engine_s(self) -> float:
        """Working time of all engines in seconds."""
        return (self.prefill_ms + self.draft_ms + self.verify_ms) / 1000

    @property
    def tokens_per_engine_s(self) -> float:
        """Generated tokens per second of engine time, which excludes start-up and file access."""
        return self.num_generated_tokens / self.engine_s if self.engine_s else 0.0

    @property
    def num_errors(self) -> int:
        return sum(self.errors_by_type.values())

    @property
    def mean_acceptance_length(self) -> float:
        return 1 + self.num_accepted_draft_tokens / self.num_steps if self.num_steps else 1.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Entry i: the share of steps that accepted at least i + 1 drafted tokens."""
        steps = sum(self.acceptance_histogram)
        if not steps:
            return []
        return [sum(self.acceptance_histogram[depth:]) / steps for depth in range(1, len(self.acceptance_histogram))]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of `_job/summary.json`."""
        data = asdict(self)
        del data["command_s"]
        return {
            **data,
            "verdict": self.verdict._asdict(),
            "depths": self.depths.to_json(),
            "audit": None if self.audit is None else loss.to_json(self.audit, self.losses),
            "actors_waited_share": self.waits.actors_waited,
            "input_waited_share": self.waits.input_waited,
            "mean_acceptance_length_convention": CONVENTION,
            **{name: getattr(self, name) for name in DERIVED},
        }

    def add_rows(self, table: pa.Table) -> None:
        """Count the rows of a table with the columns `COLUMNS`, and those further ones that the output has."""
        is_result = pc.equal(table["error_type"], "")
        results = table.filter(is_result)
        attempt_rows = results.filter(pc.equal(results["attempt"], self.attempt)) if self.attempt else results
        places = [name for name in (*PLACES, REPLICA) if name in table.column_names]
        first = [pc.fill_null(pc.equal(table[name], 0), True) for name in places]
        self.num_samples += table.num_rows
        self.num_inputs += total(reduce(pc.and_, first)) if len(first) > 1 else table.num_rows
        self.num_made += attempt_rows.num_rows
        self.num_tokens_made += total(attempt_rows["num_generated_tokens"])
        self.num_generated_tokens += total(table["num_generated_tokens"])
        add_counts(self.by_status, counts(table["status"]))
        errors = table.filter(pc.invert(is_result))
        add_counts(self.errors_by_type, counts(errors["error_type"]))
        if MESSAGE in table.column_names:
            self._keep_examples(dict(zip(*(errors[name].to_pylist() for name in ("error_type", MESSAGE)))))
        if PARTIAL in table.column_names:
            found = {kind: pc.sum(pc.match_substring(results[PARTIAL], f"{kind}: ")).as_py() for kind in parts.KINDS}
            add_counts(self.partial_videos, {kind: number for kind, number in found.items() if number})
        if FINISH_REASON in table.column_names:
            self.num_looped += total(pc.equal(results[FINISH_REASON], "looped"))
        if FAILED_CHECKS in table.column_names:
            add_counts(self.failed_checks, counts(pc.list_flatten(results[FAILED_CHECKS])))
            self.num_failed_checks += total(pc.greater(pc.list_value_length(results[FAILED_CHECKS]), 0))
        if RETRY in table.column_names:
            self.num_retried += total(pc.greater(results[RETRY], 0))
        add_counts(self.by_method, counts(results["method"]))
        if loss.LOSS in table.column_names:
            self.losses = self.losses.plus(loss.sum_of(table[loss.LOSS]))
        for name, column in TELEMETRY_SUMS.items():
            setattr(self, name, getattr(self, name) + total(pc.struct_field(table["telemetry"], column)))
        accepted = histogram(pc.struct_field(table["telemetry"], "acceptance_histogram"))
        self.acceptance_histogram = added(self.acceptance_histogram, accepted)
        extras = pc.struct_field(table["telemetry"], "extras")
        for row in extras.filter(pc.match_substring(extras, '"controller"')).to_pylist():
            self.depths.add_row(row)

    def add(self, other: Summary) -> None:
        """Add the totals and times of another summary, which counts other rows."""
        for name in ("waits", *SUMMED, *CHECKED, *TELEMETRY_SUMS):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("by_status", "errors_by_type", "partial_videos", "failed_checks", "by_method"):
            add_counts(getattr(self, name), getattr(other, name))
        self._keep_examples(other.error_examples)
        self.acceptance_histogram = added(self.acceptance_histogram, other.acceptance_histogram)
        self.depths.add(other.depths)
        self.losses = self.losses.plus(other.losses)

    def _keep_examples(self, messages: Mapping[str, str]) -> None:
        for code, message in messages.items():
            if code not in self.error_examples and len(self.error_examples) < MAX_EXAMPLES:
                self.error_examples[code] = message[:MAX_EXAMPLE_CHARS]

    def judge(self, max_error_share: float | None) -> JobVerdict:
        """Set and return the verdict over the rows of a finished job."""
        self.verdict = outcome.judge(self.num_samples, self.errors_by_type, self.error_examples, max_error_share)
        return self.verdict

    @property
    def num_truncated(self) -> int:
        """Rows whose text ends at the maximum number of tokens."""
        return self.by_status.get("truncated", 0)

    def _wall_time(self) -> str:
        if not self.command_s:
            return f"{self.wall_s:.1f} s"
        return f"{self.command_s:.1f} s, of which {self.wall_s:.1f} s from the first task to the last file"

    def lines(self) -> list[tuple[str, str]]:
        """Return the summary as lines of (label, value)."""
        total_ms = max(self.engine_s * 1000, 1e-9)
        actors, rows = self.waits.actors_waited, self.waits.input_waited
        split = (("prefill", self.prefill_ms), ("draft", self.draft_ms), ("verify", self.verify_ms))
        lines = [
            ("method", f"{self.method} ({self.verify_mode})"),
            ("rows", f"{self.num_samples:,} ({listing(self.by_status)})"),
            ("errors", listing(self.errors_by_type) or "none"),
            ("wall time", self._wall_time()),
            ("rows/s", f"{self.samples_per_s:.2f}"),
            ("tokens/s", f"{self.tokens_per_s:,.0f}"),
            ("tokens/engine s", f"{self.tokens_per_engine_s:,.0f}"),
            ("tokens", f"{self.num_generated_tokens:,} in {self.num_steps:,} steps"),
            ("engine time", ", ".join(f"{name} {100 * ms / total_ms:.0f} %" for name, ms in split)),
            ("waiting", f"actors for input {100 * actors:.0f} %, input for actors {100 * rows:.0f} %"),
            ("acceptance length", f"{self.mean_acceptance_length:.2f}"),
        ]
        if len(self.by_method) > 1 or self.waits.choices:
            lines[1:1] = [("decoded by", listing(self.by_method)), *trial_lines(self.waits.choices)]
        if self.num_truncated:
            share = 100 * self.num_truncated / self.num_samples
            lines.insert(2, ("truncated", f"{share:.1f} % of all rows reached sampling.max_new_tokens; raise it"))
        if self.limited:
            lines.insert(2, ("limited", self.limited))
        if self.skipped_files:
            lines.insert(3, ("skipped", self.skipped_files))
        if self.num_broken_files:
            text = f"{self.num_broken_files:,}, each one error row for all rows behind the damage (broken_shard)"
            lines.insert(3, ("damaged files", text))
        if self.audit is not None:
            lines += loss.lines(self.audit, self.losses)
        if self.num_retried:
            lines.insert(3, ("retried", f"{self.num_retried:,} rows have the text of a further attempt"))
        if self.num_failed_checks:
            lines.insert(3, ("failed checks", f"{self.num_failed_checks:,} rows ({listing(self.failed_checks)})"))
        if self.num_looped:
            lines.insert(3, ("looped", f"{self.num_looped:,} rows ended early by sampling.stop_loops"))
        if self.partial_videos:
            lines.insert(3, ("partial videos", listing(self.partial_videos)))
        if self.num_degraded:
            lines.append(("without drafter", f"{self.num_degraded:,} rows, because it failed on them"))
        for position, share in enumerate(self.acceptance_by_position, start=1):
            filled = round(BAR_WIDTH * share)
            lines.append((f"  position {position}", f"{'█' * filled}{'·' * (BAR_WIDTH - filled)} {share:.2f}"))
        lines += self.depths.lines()
        if self.attempt > 1:
            lines.insert(1, ("attempt", f"{self.attempt}, which made {counted(self.num_made, 'row')}"))
        lines += [("acceptance drift", text) for text in self.drifts[:MAX_DRIFTS_SHOWN]]
        if len(self.drifts) > MAX_DRIFTS_SHOWN:
            lines.append(("  and more", f"{len(self.drifts) - MAX_DRIFTS_SHOWN} further changes are in the report"))
        if self.max_rows_in_flight:
            in_flight = f"at most {self.max_rows_in_flight:,} rows in flight"
            lines.append(("a kill costs", f"{in_flight} and {self.max_unsaved_seconds:g} s of finished ones"))
        return [("failed", self.verdict.reason), *lines] if self.verdict.reason else lines


Kind = TypeVar("Kind", bound=Summary)


def count(output: OutputDir, summary: Kind, workers: Workers = IN_PROCESS) -> Kind:
    """Count the rows of an output into an empty summary of any kind, and return it.

    Partitions of files are counted separately and then added, in order, wherever `workers` run them.
    """
    summary.attempt = max(output.list_attempts(), default=0)
    names = list_tables(output, (DATA, ERRORS))
    empty = deepcopy(replace(summary, wall_s=0.0, waits=NO_WAITS))
    for part in workers.map(
        partial(_counted, output, empty), partitions_of(names), READ_FILE_S * len(names), "summary", "sink.path"
    ):
        summary.add(part)
    return summary


def _counted(output: OutputDir, empty: Kind, names: Sequence[str]) -> Kind:
    part = deepcopy(empty)
    for table in read_tables(output, names, (*COLUMNS, *PLACES, MESSAGE, *OPTIONAL)):
        part.add_rows(table)
    return part


def combine(parts: Sequence[Summary]) -> Summary:
    """Sum the summaries of several jobs of one method that ran one after the other."""
    both = Summary(", ".join(part.job_id for part in parts), parts[0].method, parts[0].verify_mode, 0.0)
    for part in parts:
        both.add(part)
    return both


def show(summary: Summary) -> str:
    lines = [*summary.lines(), ("", f"acceptance length = {CONVENTION}")]
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in lines)


def show_side_by_side(left: Summary, right: Summary) -> str:
    """Return two summaries as text in two columns."""
    left_lines, right_lines = dict(left.lines()), dict(right.lines())
    labels = [*left_lines, *(label for label in right_lines if label not in left_lines)]
    label_width = max(map(len, labels))
    value_width = max(len(value) for value in left_lines.values())
    return "\n".join(
        f"{label:<{label_width}}  {left_lines.get(label, ''):<{value_width}}  {right_lines.get(label, '')}".rstrip()
        for label in labels
    )
