"""The rows of a batch: enough for the slots, bounded, and small enough that all actors have work."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.pool import EnginePoolConfig
from pipeline.run.job_plan import BATCHES_PER_ACTOR, MAX_BATCH_ROWS, ROWS_PER_SLOT, choose_batch_rows
from tests.pipeline.attempts import job, plan_of


@pytest.mark.parametrize(
    ("pool", "num_samples", "rows_per_sample", "batch_rows"),
    [
        ({"batch_rows": 7}, 10**9, 1, 7),  # a given number stays
        ({}, 0, 1, 32),
        ({}, 64 * 32, 1, 32),
        ({}, 64 * 33, 1, 33),
        ({}, 10**9, 1, 512),
        ({}, None, 1, 512),  # an unknown number counts as large
        ({"max_size": 1000}, 10**6, 1, 32),
        ({"max_size": 1000}, 10**9, 1, 512),
        ({"slots": 256}, 100, 1, 256),  # two batches have twice the rows of the slots
        ({"slots": 256, "max_batches_in_flight": 4}, 100, 1, 128),
        ({"slots": "auto"}, 100, 1, 64),
        ({"slots": 4096, "max_batches_in_flight": 1}, None, 1, 8192),
        ({}, None, 50, 10),
        ({}, 10, 50, 10),
        ({"slots": 4096}, None, 50, 82),
        ({}, None, 10_000, 1),
    ],
)
def test_rows_of_a_batch(pool: dict[str, Any], num_samples: int | None, rows_per_sample: int, batch_rows: int) -> None:
    assert choose_batch_rows(EnginePoolConfig(**pool), num_samples, rows_per_sample, 512) == batch_rows


@given(
    slots=st.integers(1, 4096),
    in_flight=st.integers(1, 64),
    actors=st.integers(1, 1000),
    num_samples=st.integers(0, 10**10),
    rows_per_sample=st.integers(1, 64),
)
def test_slots_are_fed_and_batches_are_bounded(
    slots: int, in_flight: int, actors: int, num_samples: int, rows_per_sample: int
) -> None:
    pool = EnginePoolConfig(slots=slots, max_batches_in_flight=in_flight, max_size=actors)
    rows = choose_batch_rows(pool, num_samples, rows_per_sample, MAX_BATCH_ROWS)
    assert in_flight * rows * rows_per_sample >= ROWS_PER_SLOT * slots
    assert rows * rows_per_sample <= max(MAX_BATCH_ROWS, rows_per_sample * (1 + ROWS_PER_SLOT * slots))
    least = choose_batch_rows(pool, 0, rows_per_sample, MAX_BATCH_ROWS)
    assert rows == least or rows * actors * BATCHES_PER_ACTOR <= num_samples


def test_a_plan_has_the_rows_of_its_batches(tmp_path: Any) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("row\n" * 64 * 40)
    config = job({"kind": "text", "path": str(tmp_path / "in")}, tmp_path / "out", pool={"slots": 4})
    plan, limited = plan_of(config), plan_of(config, limit=100)
    assert plan.config.pool.batch_rows == 40
    assert limited.config.pool.batch_rows == 32
    assert plan.identity.fingerprint == limited.identity.fingerprint
