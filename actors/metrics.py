"""Defines and updates the Ray metrics of an engine actor, once per batch from completions and results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from actors.results import Stamp, counts
from actors.serving.engine_thread import Waits
from decoding.types import Completion

ACCEPTANCE_BOUNDARIES = [1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 24.0]


@dataclass(frozen=True)
class Metric:
    """Definition of one metric; Ray exports it as `ray_<name>`, and a counter as `ray_<name>_total`."""

    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    label: str = ""
    """Further label besides `job_id` and `method`."""

    def exported(self, name: str) -> str:
        """Return the metric's name in Prometheus."""
        return f"ray_{name}_total" if self.kind == "counter" else f"ray_{name}"


METRICS = {
    "draftfleet_samples": Metric("counter", "rows that have left the engines", "status"),
    "draftfleet_errors": Metric("counter", "rows among them that failed", "code"),
    "draftfleet_tokens": Metric("counter", "generated tokens"),
    "draftfleet_steps": Metric("counter", "draft-verify steps of rows"),
    "draftfleet_draft_tokens": Metric("counter", "drafted tokens"),
    "draftfleet_accepted_draft_tokens": Metric("counter", "drafted tokens that were accepted"),
    "draftfleet_acceptance_length": Metric(
        "histogram", "1 + accepted drafts / steps of a row, the bonus token included"
    ),
    "draftfleet_phase_seconds": Metric("counter", "engines' time in prefill, draft and verify", "phase"),
    "draftfleet_slots": Metric("gauge", "slots of the engine"),
    "draftfleet_slots_in_use": Metric("gauge", "slots in use on average over the steps of the last batch"),
    "draftfleet_chosen_steps": Metric("counter", "steps of rows whose depth a controller chose; 0 is off", "levels"),
    "draftfleet_measuring_steps": Metric("counter", "steps among them that measured"),
    "draftfleet_off_share": Metric("gauge", "share of the last batch's chosen steps that had no drafts"),
    "draftfleet_expected_tokens_per_second": Metric(
        "gauge",
        "tokens per second that the controller expected of its choice, and of plain decoding, in the last batch",
        "decoding",
    ),
    "draftfleet_input_wait_seconds": Metric("counter", "time in which the engine had no row"),
    "draftfleet_queue_seconds": Metric("counter", "time in which rows waited for a slot"),
}
DRIFT_METRICS = {
    "draftfleet_acceptance_drops": Metric("counter", "drops of acceptance beyond `job.drift`", "source"),
    "draftfleet_acceptance_ratio": Metric(
        "gauge", "acceptance length of a source's last window as a multiple of that of the job's first rows", "source"
    ),
}
"""Metrics of the driver's node, updated per window of rows."""
LABELS = ("job_id", "method")


def engine_metrics(stamp: Stamp, method: str, num_slots: int) -> EngineMetrics | None:
    """Create the metrics of one actor; None if Ray is not initialised."""
    import ray

    return EngineMetrics(stamp, method, num_slots) if ray.is_initialized() else None


class EngineMetrics:
    """The metrics of one actor, updated once per batch."""

    def __init__(self, stamp: Stamp, method: str, num_slots: int) -> None:
        self._metrics = {name: _make(name, metric) for name, metric in METRICS.items()}
        for metric in self._metrics.values():
            metric.set_default_tags({"job_id": stamp.job_id, "method": method})
        self._waits = Waits()
        self._metrics["draftfleet_slots"].set(num_slots)

    def batch(self, result: pa.Table, completions: Collection[Completion], waits: Waits) -> None:
        """Add one batch to the metrics; `waits` are the engine's total wait times so far."""
        for label, column, name in (("status", "status", "samples"), ("code", "error_type", "errors")):
            for value, number in Counter(result.column(column).to_pylist()).items():
                if value:
                    self._add(name, number, {label: value})
        num_tokens, num_steps, num_accepted = counts(completions)
        telemetries = [completion.telemetry for completion in completions]
        self._add("tokens", num_tokens)
        self._add("steps", num_steps)
        self._add("draft_tokens", sum(telemetry.num_draft_tokens for telemetry in telemetries))
        self._add("accepted_draft_tokens", num_accepted)
        for phase in ("prefill", "draft", "verify"):
            seconds = sum(getattr(telemetry, f"{phase}_ms") for telemetry in telemetries) / 1000
            self._add("phase_seconds", seconds, {"phase": phase})
        for telemetry in telemetries:
            if telemetry.num_spec_steps:  # one token comes from the prefill
                length = 1 + telemetry.num_accepted_draft_tokens / telemetry.num_spec_steps
                self._metrics["draftfleet_acceptance_length"].observe(length)
        self._count_choices([row.extras["controller"] for row in telemetries if "controller" in row.extras])
        if num_steps:
            in_use = sum(telemetry.batch_size_mean * telemetry.num_spec_steps for telemetry in telemetries) / num_steps
            self._metrics["draftfleet_slots_in_use"].set(in_use)
        self._add("input_wait_seconds", waits.idle_s - self._waits.idle_s)
        self._add("queue_seconds", waits.queued_s - self._waits.queued_s)
        self._waits = waits

    def _count_choices(self, chosen: list[dict[str, Any]]) -> None:
        """Add the draft depths that a controller chose, from the telemetry of its rows."""
        sizes = [entry for row in chosen for entry in row["by_batch_size"].values()]
        levels: Counter[str] = Counter()
        for at_size in sizes:
            levels.update(at_size["levels"])
        for depth, number in sorted(levels.items(), key=lambda item: int(item[0])):
            self._add("chosen_steps", number, {"levels": depth})
        self._add("measuring_steps", sum(row["num_measuring_steps"] for row in chosen))
        if levels:
            self._metrics["draftfleet_off_share"].set(levels["0"] / levels.total())
        if num_promised := sum(at_size["num_promised_steps"] for at_size in sizes):
            for decoding, rate in (("chosen", "tokens_per_s"), ("plain", "plain_tokens_per_s")):
                total = sum(at_size["num_promised_steps"] * at_size[rate] for at_size in sizes)
                labels = {"decoding": decoding}
                self._metrics["draftfleet_expected_tokens_per_second"].set(total / num_promised, labels)

    def _add(self, name: str, amount: float, labels: dict[str, str] | None = None) -> None:
        if amount > 0:  # Ray accepts only positive amounts
            self._metrics[f"draftfleet_{name}"].inc(amount, labels)


class DriftMetrics:
    """The metrics of drift of one job."""

    def __init__(self, stamp: Stamp) -> None:
        self._metrics = {name: _make(name, metric) for name, metric in DRIFT_METRICS.items()}
        for metric in self._metrics.values():
            metric.set_default_tags({"job_id": stamp.job_id})

    def drop(self, source: str, method: str) -> None:
        self._metrics["draftfleet_acceptance_drops"].inc(1, {"source": source, "method": method})

    def ratio(self, source: str, method: str, ratio: float) -> None:
        self._metrics["draftfleet_acceptance_ratio"].set(ratio, {"source": source, "method": method})


def _make(name: str, metric: Metric) -> Any:
    from ray.util import metrics

    labels = (*LABELS, metric.label) if metric.label else LABELS
    if metric.kind == "histogram":
        return metrics.Histogram(name, metric.meaning, ACCEPTANCE_BOUNDARIES, labels)
    return (metrics.Counter if metric.kind == "counter" else metrics.Gauge)(name, metric.meaning, labels)
