"""Tests estimates: the pilot's rows are spread over the source, and its time is scaled up, with an interval."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from configs.load import ConfigError, validate
from configs.method import MethodConfig
from configs.pool import PoolConfig
from pipeline.pilot import estimate as module
from pipeline.pilot import figures
from pipeline.pilot.estimate import Pilot, draw, estimate
from pipeline.pilot.repeats import repeated
from pipeline.pilot.verdict import MethodResult, PilotVerdict, Range


class Spans:
    """A fake source of spans with the given numbers of rows."""

    def __init__(self, span_rows: list[int], num_samples: int | None = None) -> None:
        self.span_rows, self.num_samples = span_rows, num_samples
        self.read_spans: list[int] = []

    @property
    def num_spans(self) -> int:
        return len(self.span_rows)

    def read(self, span: int, note: bool) -> pa.Table:
        assert not note
        self.read_spans.append(span)
        rows = self.span_rows[span]
        return pa.table(
            {"source": pa.array([f"s{span}"] * rows, pa.string()), "row_index": pa.array(range(rows), pa.int64())}
        )


def results(pilot: Pilot, engine_s: Any, rows_each: int = 1, code: str = "") -> pa.Table:
    """`rows_each` rows of every sample, each of which took `engine_s(span, row)`."""
    rows: list[dict[str, Any]] = []
    for span, table in enumerate(pilot.tables):
        for source, index in zip(table["source"].to_pylist(), table["row_index"].to_pylist()):
            milliseconds = 1000.0 * engine_s(span, index)
            for _ in range(rows_each):
                telemetry = {
                    "prefill_ms": 0.5 * milliseconds,
                    "draft_ms": 0.2 * milliseconds,
                    "verify_ms": 0.3 * milliseconds,
                    "num_spec_steps": 10,
                    "num_accepted_draft_tokens": 15,
                }
                row = {"source": source, "row_index": index, "error_type": code, "num_generated_tokens": 20}
                rows.append({**row, "method": "plain", "generated_text": "x" * 50, "telemetry": telemetry})
    return pa.Table.from_pylist(rows)


def test_a_pilot_takes_samples_from_all_over_the_source_and_all_over_each_span() -> None:
    source = Spans([100] * 1000)
    pilot = draw(source, 48)  # type: ignore[arg-type]
    assert (pilot.size, len(pilot.tables)) == (48, module.MAX_SPANS)
    assert source.read_spans == [(2 * index + 1) * 1000 // 48 for index in range(24)]  # the middles of 24 equal parts
    assert pilot.tables[0]["row_index"].to_pylist() == [25, 75]


def test_a_pilot_takes_all_rows_of_a_small_source_and_compensates_for_short_spans() -> None:
    assert draw(Spans([3, 2]), 100).size == 5  # type: ignore[arg-type]
    pilot = draw(Spans([1, 1, 50]), 12)  # type: ignore[arg-type]
    assert [table.num_rows for table in pilot.tables] == [1, 1, 10]
    assert draw(Spans([7]), 1).tables[0]["row_index"].to_pylist() == [3]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hold no samples"):
        draw(Spans([0, 0]), 3)  # type: ignore[arg-type]


def test_equal_rows_are_extrapolated_with_an_interval_of_zero_width() -> None:
    pilot = draw(Spans([100] * 50, num_samples=5000), 48)  # type: ignore[arg-type]
    made = estimate(pilot, results(pilot, lambda span, row: 0.9), PoolConfig(num_gpus=0.5, max_size=4), None, 3.0)
    assert (made.samples.value, made.rows.value) == (5000, 5000)
    assert made.engine_hours.value == pytest.approx(5000 * 0.9 / 3600)
    assert (made.engine_hours.low, made.engine_hours.high) == pytest.approx((1.25, 1.25))
    assert (made.device, made.device_hours.value) == ("GPU", pytest.approx(0.625))
    assert made.wall_hours.value == pytest.approx(1.25 / 4)
    assert made.tokens.value == pytest.approx(100_000)
    assert made.cost is not None
    assert made.cost.value == pytest.approx(1.875)
    assert made.mean_acceptance_length == 2.5


def test_without_gpus_the_cores_of_an_engine_are_counted_and_nothing_costs_without_a_price() -> None:
    pilot = draw(Spans([10] * 8, num_samples=80), 16)  # type: ignore[arg-type]
    made = estimate(pilot, results(pilot, lambda span, row: 36.0), PoolConfig(), threads=2)
    assert (made.device, made.device_hours.value) == ("core", pytest.approx(1.6))
    assert made.cost is None
    assert "cost" not in made.show()


def test_several_rows_of_a_sample_count_for_it() -> None:
    pilot = draw(Spans([10] * 8, num_samples=800), 16)  # type: ignore[arg-type]
    made = estimate(pilot, results(pilot, lambda span, row: 1.0, rows_each=3, code="broken_image"), PoolConfig(), 1)
    assert (made.samples.value, made.rows.value, made.pilot_rows, made.pilot_errors) == (800, 2400, 48, 48)
    assert made.engine_hours.value == pytest.approx(2400 / 3600)


def test_rows_of_one_file_are_alike_so_the_interval_is_as_wide_as_files_differ() -> None:
    pilot = draw(Spans([100] * 24, num_samples=2400), 240)  # type: ignore[arg-type]
    by_file = estimate(pilot, results(pilot, lambda span, row: 1.0 + 3.0 * (span % 2)), PoolConfig(), 1)
    by_row = estimate(pilot, results(pilot, lambda span, row: 1.0 + 3.0 * (row % 20 < 10)), PoolConfig(), 1)
    assert by_file.engine_hours.value == pytest.approx(2.5 * 2400 / 3600)
    width = (by_file.engine_hours.high - by_file.engine_hours.low) / by_file.engine_hours.value
    assert width == pytest.approx(2 * 1.645 * 1.5 / np.sqrt(24) / 2.5, rel=0.15)  # of 24 files, and not of 240 rows
    assert by_row.engine_hours.high - by_row.engine_hours.low < 0.2 * (
        by_file.engine_hours.high - by_file.engine_hours.low
    )


def test_the_interval_has_about_its_nominal_coverage() -> None:
    rng = np.random.default_rng(7)
    held = 0
    for trial in range(100):
        costs = rng.gamma(2.0, 1.0, 24)
        pilot = draw(Spans([10] * 24, num_samples=240), 48)  # type: ignore[arg-type]
        made = estimate(pilot, results(pilot, lambda span, row, costs=costs: costs[span]), PoolConfig(), 1, seed=trial)
        held += made.engine_hours.low <= 2.0 * 240 / 3600 <= made.engine_hours.high
    assert 84 <= held <= 97


def test_a_single_span_is_drawn_again_row_by_row() -> None:
    pilot = draw(Spans([400], num_samples=400), 100)  # type: ignore[arg-type]
    made = estimate(pilot, results(pilot, lambda span, row: 1.0 + 2.0 * (row >= 200)), PoolConfig(), 1)
    assert made.engine_hours.value == pytest.approx(800 / 3600)
    width = (made.engine_hours.high - made.engine_hours.low) / made.engine_hours.value
    assert width == pytest.approx(2 * 1.645 * 1.0 / np.sqrt(100) / 2.0, rel=0.15)
    assert "the source has few spans" in made.show()


def test_the_number_of_samples_is_estimated_if_it_is_unknown_before_reading() -> None:
    pilot = draw(Spans([50, 150] * 500), 48)  # type: ignore[arg-type]
    made = estimate(pilot, results(pilot, lambda span, row: 1.0), PoolConfig(), 1)
    assert made.samples.low < 100_000 < made.samples.high
    assert made.engine_hours.low == pytest.approx(made.samples.low / 3600)
    assert "samples           " in made.show()


def test_the_table_and_the_json_have_the_same_values() -> None:
    pilot = draw(Spans([100] * 50, num_samples=5000), 48)  # type: ignore[arg-type]
    made = estimate(pilot, results(pilot, lambda span, row: 0.9), PoolConfig(num_gpus=1, max_size=1), None, 2.0)
    result = json.loads(made.to_json())
    assert result["device_hours"] == {
        "value": pytest.approx(1.25),
        "low": pytest.approx(1.25),
        "high": pytest.approx(1.25),
    }
    assert result["interval"] == 0.9
    lines = dict(line.split(maxsplit=1) for line in made.show().splitlines())
    assert lines["GPU-hours"] == "1.2"
    assert lines["cost"] == "2.5, at 2 per GPU-hour"
    assert lines["intervals"] == "90 %, Student's t, over 24 of 50 spans"
    assert lines["wall"] == "clock        75 min"
    assert lines["pilot"] == "48 samples, 48 rows, 0 of them failed"
    assert "note: 48 rows do not fill 16 slots for long" in made.show()


def test_with_a_verdict_hours_are_those_of_the_method_at_full_slots() -> None:
    pilot = draw(Spans([100] * 50, num_samples=5000), 48)  # type: ignore[arg-type]
    some, single = Range(0.1, 0.1, 0.1), Range(1.0, 1.0, 1.0)
    methods = tuple(
        MethodResult(name, True, Range(row_s, row_s, row_s), single, length, "")
        for name, row_s, length in (("plain", 0.8, 1.0), ("chain", 0.4, 3.0))
    )
    verdict = PilotVerdict(some, some, some, single, single, methods, "chain", "why", "vision tower")
    rows = results(pilot, lambda span, row: 0.9)
    made = estimate(pilot, rows, PoolConfig(num_gpus=1), None, 2.0, 0, verdict, "chain")
    assert made.engine_hours.value == pytest.approx(5000 * 0.4 / 3600)
    assert made.mean_acceptance_length == 3.0
    assert made.verdict is not None
    assert [method.device_hours.value for method in made.verdict.methods if method.device_hours] == pytest.approx(
        [5000 * 0.8 / 3600, 5000 * 0.4 / 3600]
    )
    assert "too few rows" not in made.show()
    assert json.loads(made.to_json())["verdict"]["recommended"] == "chain"
    unknown = estimate(pilot, rows, PoolConfig(num_gpus=1), None, 2.0, 0, verdict, "another")
    assert unknown.engine_hours.value == pytest.approx(5000 * 0.9 / 3600)


def test_the_size_of_the_output_follows_from_the_rows_as_they_would_be_written() -> None:
    pilot = draw(Spans([100] * 50, num_samples=5000), 48)  # type: ignore[arg-type]
    rows = results(pilot, lambda span, row: 0.9)
    made = estimate(pilot, rows, PoolConfig(), 1)
    assert made.output_bytes.value == pytest.approx(module._written(rows) / 48 * 5000, rel=0.01)


def test_rows_of_several_methods_are_reported_as_a_trial() -> None:
    pilot = draw(Spans([100] * 50), 48)  # type: ignore[arg-type]
    rows = results(pilot, lambda span, row: 0.9)
    assert "several methods" not in estimate(pilot, rows, PoolConfig(), 1).show()
    names = pa.array(["plain"] * 20 + ["chain"] * 28)
    tried = rows.set_column(rows.schema.get_field_index("method"), "method", names)
    assert "decoded by several methods, which method.auto tries (chain 28, plain 20)" in estimate(
        pilot, tried, PoolConfig(), 1
    ).show().replace("\n", " ")


def test_rows_of_plain_decoding_count_neither_for_acceptance_nor_for_the_time_of_a_method() -> None:
    pilot = draw(Spans([100] * 50, num_samples=5000), 48)  # type: ignore[arg-type]
    rows = results(pilot, lambda span, row: 0.9)
    chain = results(pilot, lambda span, row: 0.3)
    for telemetry, accepted in ((rows["telemetry"], 0), (chain["telemetry"], 30)):
        values = [{**row, "num_accepted_draft_tokens": accepted} for row in telemetry.to_pylist()]
        table = rows if accepted == 0 else chain
        table = table.set_column(table.schema.get_field_index("telemetry"), "telemetry", pa.array(values))
        table = table.set_column(
            table.schema.get_field_index("method"), "method", pa.array(["chain" if accepted else "plain"] * 48)
        )
        rows, chain = (table, chain) if accepted == 0 else (rows, table)
    both = pa.concat_tables([rows, chain])
    made = estimate(replace(pilot, repeats=2), both, PoolConfig(num_gpus=1), None, method="chain")
    assert made.mean_acceptance_length == 4.0
    assert made.engine_hours.value == pytest.approx(5000 * 0.3 / 3600)
    assert (made.rows.value, made.tokens.value) == pytest.approx((5000, 100_000))


def test_a_job_of_other_rows_than_the_source_is_planned() -> None:
    pilot = draw(Spans([100] * 50, num_samples=5000), 16)  # type: ignore[arg-type]
    made = estimate(pilot, results(pilot, lambda span, row: 0.9), PoolConfig(num_gpus=1), None, total_rows=10**6)
    assert (made.samples.value, made.rows.value) == (10**6, 10**6)
    assert made.engine_hours.value == pytest.approx(10**6 * 0.9 / 3600)
    assert "rows              1,000,000\n" in made.show()
    assert "wall clock        10 days" in made.show()


@pytest.mark.parametrize("num_samples", [16, 24])
def test_the_interval_of_a_small_pilot_has_about_its_nominal_coverage(num_samples: int) -> None:
    rng, held = np.random.default_rng(11), 0
    for trial in range(100):
        costs = rng.gamma(2.0, 1.0, num_samples)
        pilot = draw(Spans([10] * num_samples, num_samples=10**6), num_samples)  # type: ignore[arg-type]
        made = estimate(pilot, results(pilot, lambda span, row, costs=costs: costs[span]), PoolConfig(), 1, seed=trial)
        held += made.engine_hours.low <= 2.0 * 10**6 / 3600 <= made.engine_hours.high
    assert 83 <= held <= 98


def test_figures_have_two_digits_and_units() -> None:
    shown = [figures.figure(value) for value in (0, 0.00123, 0.0567, 1.25, 9.96, 12.5, 123.4, 98_765)]
    assert shown == ["0", "0.0012", "0.057", "1.2", "10.0", "12", "120", "99,000"]
    assert figures.time(Range(45.0, 40.0, 50.0)) == "45 (40 to 50) s"
    assert figures.time(Range(7200.0, 3600.0, 10_800.0)) == "2.0 (1.0 to 3.0) h"
    assert figures.size(Range(3.2e9, 3.2e9, 3.2e9)) == "3.2 GB"
    assert figures.size(Range(900.0, 900.0, 900.0)) == "0.90 kB"


def test_small_pilots_are_repeated_until_each_method_has_rows_enough() -> None:
    chain = validate(MethodConfig, {"drafter": {"kind": "model"}}, "test")
    pilot = draw(Spans([10] * 8), 16)  # type: ignore[arg-type]
    assert repeated(pilot, chain, PoolConfig(slots=16)).repeats * 16 >= 256
    assert repeated(pilot, chain, PoolConfig(slots="auto")).repeats == 1
    suffix = validate(MethodConfig, {"drafter": {"kind": "suffix"}}, "test")
    assert repeated(pilot, suffix, PoolConfig(slots=16)).repeats == 1
    assert repeated(draw(Spans([100] * 8), 400), chain, PoolConfig(slots=16)).repeats == 1  # type: ignore[arg-type]
    assert replace(pilot, repeats=3).datasource.num_spans == 24
