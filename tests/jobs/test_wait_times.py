"""Tests that wait times of actors reach the driver, and that Ray enforces the limit of rows read ahead."""

from __future__ import annotations

import math

import pytest
from ray.data import DataContext

from actors.serving.engine_thread import Waits
from pipeline.run import wait_times
from pipeline.run.graph import configure


@pytest.mark.usefixtures("local_ray")
def test_the_last_report_of_each_actor_counts() -> None:
    with wait_times.collect_waits() as measured:
        assert measured.total() == Waits()
        measured.report("a", Waits(1.0, 1.0, 4.0))
        measured.report("b", Waits(0.0, 3.0, 3.0))
        measured.report("a", Waits(2.0, 1.0, 5.0))
        assert measured.total() == Waits(2.0, 4.0, 8.0)


def test_the_bound_on_prefetched_bytes_is_set_and_restored() -> None:
    context = DataContext.get_current()
    configure(context, 123 << 20)
    assert context.execution_options.resource_limits.object_store_memory == 123 << 20
    configure(context)
    assert context.execution_options.resource_limits.object_store_memory == math.inf
