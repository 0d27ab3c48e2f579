"""Metrics of actors, with fakes in place of Ray's metrics."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from actors import metrics
from actors.results import Stamp
from actors.serving.engine_thread import Waits
from decoding.controllers.base import DepthChoice
from decoding.stats import Choices
from decoding.types import Completion, Telemetry

STAMP = Stamp("job-1", 1, "f")
ROOT = Path(__file__).resolve().parents[2]


class Made:
    """Records values; refuses the values that Ray refuses."""

    def __init__(self, name: str, description: str, *rest: Any) -> None:
        self.name, self.labels, self.calls = name, rest[-1], []
        self.fixed: dict[str, str] = {}

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert set(tags) <= set(self.labels)
        self.fixed = tags

    def _tell(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert set(self.fixed) | set(tags or {}) == set(self.labels), self.name
        self.calls.append((value, *(tags or {}).values()))

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert value > 0
        self._tell(value, tags)

    set = observe = _tell


@pytest.fixture
def engine_metrics(monkeypatch: pytest.MonkeyPatch) -> metrics.EngineMetrics:
    import ray.util.metrics

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(ray.util.metrics, kind, Made)
    return metrics.EngineMetrics(STAMP, "sd-chain", num_slots=8)


def values(engine_metrics: metrics.EngineMetrics) -> dict[str, list[tuple[Any, ...]]]:
    return {name: made.calls for name, made in engine_metrics._metrics.items() if made.calls}


def result(*rows: tuple[str, str]) -> pa.Table:
    return pa.table({"status": [row[0] for row in rows], "error_type": [row[1] for row in rows]})


def completion(num_tokens: int, steps: int, drafted: int, accepted: int, batch_size: float = 1.0) -> Completion:
    telemetry = Telemetry(
        num_spec_steps=steps,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        prefill_ms=100.0,
        draft_ms=20.0 * steps,
        verify_ms=30.0 * steps,
        batch_size_mean=batch_size,
    )
    return Completion("id", token_ids=tuple(range(num_tokens)), telemetry=telemetry)


def test_a_batch_is_counted_by_status_code_and_phase(engine_metrics: metrics.EngineMetrics) -> None:
    rows = [("success", ""), ("error", "broken_image"), ("error", "broken_image"), ("truncated", "")]
    ran = [completion(9, 4, 20, 5, batch_size=6.0), completion(3, 1, 5, 1, batch_size=1.0)]
    engine_metrics.batch(result(*rows), ran, Waits(idle_s=1.5, queued_s=0.25, total_s=9.0))
    assert values(engine_metrics) == {
        "draftfleet_samples": [(1, "success"), (2, "error"), (1, "truncated")],
        "draftfleet_errors": [(2, "broken_image")],
        "draftfleet_tokens": [(12,)],
        "draftfleet_steps": [(5,)],
        "draftfleet_draft_tokens": [(25,)],
        "draftfleet_accepted_draft_tokens": [(6,)],
        "draftfleet_acceptance_length": [(2.25,), (2.0,)],
        "draftfleet_phase_seconds": [(0.2, "prefill"), (0.1, "draft"), (0.15, "verify")],
        "draftfleet_slots": [(8,)],
        "draftfleet_slots_in_use": [(5.0,)],
        "draftfleet_input_wait_seconds": [(1.5,)],
        "draftfleet_queue_seconds": [(0.25,)],
    }


def test_waits_are_reported_as_increments(engine_metrics: metrics.EngineMetrics) -> None:
    for idle_s in (1.0, 1.0, 4.0):
        engine_metrics.batch(result(), [], Waits(idle_s=idle_s))
    assert values(engine_metrics)["draftfleet_input_wait_seconds"] == [(1.0,), (3.0,)]


def test_rows_that_never_ran_and_rows_of_one_token_are_no_steps(engine_metrics: metrics.EngineMetrics) -> None:
    engine_metrics.batch(result(("success", "")), [completion(1, 0, 0, 0), Completion("id")], Waits())
    assert set(values(engine_metrics)) == {
        *("draftfleet_samples", "draftfleet_tokens", "draftfleet_phase_seconds", "draftfleet_slots"),
    }


def controlled(*steps: tuple[int, DepthChoice]) -> Completion:
    """A row of these steps, each with its batch size."""
    counted = Choices()
    for num_active, choice in steps:
        counted.add(num_active, choice)
    telemetry = Telemetry(num_spec_steps=len(steps), extras={"lookup_match_rate": 0.5} | counted.extras())
    return Completion("id", token_ids=(1,), telemetry=telemetry)


def test_chosen_depths_are_reported_with_expected_speeds(engine_metrics: metrics.EngineMetrics) -> None:
    first = controlled(
        (8, DepthChoice(0, "start")),
        (8, DepthChoice(13, "start", 30.0, 10.0)),
        (8, DepthChoice(13, "best", 60.0, 20.0)),
        (2, DepthChoice(5, "explore", 120.0, 90.0)),
        (2, DepthChoice(0, "last", 7.0, 7.0)),
    )
    second = controlled((1, DepthChoice(0, "best", 10.0, 40.0)))
    engine_metrics.batch(result(), [first, completion(9, 4, 20, 5), second], Waits())
    samples = values(engine_metrics)
    # As text, 13 sorts before 5. Sums over steps: chosen 30 + 60 + 120 + 10, plain 10 + 20 + 90 + 40, of 4.
    assert samples["draftfleet_chosen_steps"] == [(2, "0"), (1, "5"), (2, "13")]
    assert samples["draftfleet_measuring_steps"] == [(3,)]
    assert samples["draftfleet_off_share"] == [(0.4,)]
    assert samples["draftfleet_expected_tokens_per_second"] == [(55.0, "chosen"), (40.0, "plain")]


def test_a_batch_without_drafts_is_reported_as_off_and_one_without_a_choice_is_not_reported(
    engine_metrics: metrics.EngineMetrics,
) -> None:
    engine_metrics.batch(result(), [controlled((1, DepthChoice(0, "start")))], Waits())
    engine_metrics.batch(result(), [controlled((1, DepthChoice(3, "best", 1.0, 1.0)))], Waits())
    engine_metrics.batch(result(), [controlled((1, DepthChoice(3, "fixed")), (1, DepthChoice(0, "last")))], Waits())
    samples = values(engine_metrics)
    assert samples["draftfleet_chosen_steps"] == [(1, "0"), (1, "3")]
    assert samples["draftfleet_off_share"] == [(1.0,), (0.0,)]


def test_every_series_is_labelled_with_job_and_method(engine_metrics: metrics.EngineMetrics) -> None:
    fixed = {tuple(made.fixed.items()) for made in engine_metrics._metrics.values()}
    assert fixed == {(("job_id", "job-1"), ("method", "sd-chain"))}
    assert set(engine_metrics._metrics) == set(metrics.METRICS)


def test_without_ray_no_metrics_are_created() -> None:
    program = """
import sys
from actors.metrics import engine_metrics
from actors.results import Stamp
assert engine_metrics(Stamp("j", 1, "f"), "m", 2) is None
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
