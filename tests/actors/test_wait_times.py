"""Wait times of the engine thread, with a clock that counts its reads."""

from __future__ import annotations

import itertools
import threading

import pytest

from actors.serving.engine_thread import EngineThread, Waits
from decoding import Request
from tests.actors.fakes import FakeEngine, num_steps_of


def request(sample_id: str) -> Request:
    return Request(sample_id, "x")


def running(slots: int) -> tuple[FakeEngine, EngineThread]:
    engine = FakeEngine(slots)
    ticks = itertools.count()
    return engine, EngineThread(engine, clock=lambda: float(next(ticks)))


def test_time_between_batches_is_idle_and_time_before_the_first_and_after_the_last_is_not_counted() -> None:
    _, thread = running(slots=4)
    for name in ("a", "b", "c"):
        thread.decode([request(name)]).result(timeout=600)
    thread.close()
    steps = sum(num_steps_of(name) for name in ("a", "b", "c"))
    # A step reads the clock twice, an arrival after idle time once; each read is one tick.
    assert thread.waits == Waits(idle_s=2.0, queued_s=0.0, total_s=2.0 + steps)


def test_rows_that_have_no_slot_are_waited_with() -> None:
    engine, thread = running(slots=1)
    names = ("a", "b", "c")
    thread.decode([request(name) for name in names]).result(timeout=600)
    thread.close()
    assert engine.num_waiting == 0
    steps = [num_steps_of(name) for name in names]
    assert thread.waits == Waits(idle_s=0.0, queued_s=float(sum(steps[:-1])), total_s=float(sum(steps)))


def test_a_slow_engine_with_batches_in_flight_never_waits() -> None:
    gate = threading.Semaphore(0)
    engine = FakeEngine(2, gate)
    thread = EngineThread(engine)
    futures = [thread.decode([request(f"{batch}-{row}") for row in range(3)]) for batch in range(4)]
    gate.release(1000)
    for future in futures:
        future.result(timeout=600)
    thread.close()
    assert thread.waits.actors_waited == 0.0
    assert 0.0 < thread.waits.input_waited <= 1.0


def test_shares_of_several_actors_weigh_by_their_time() -> None:
    total = Waits(1.0, 2.0, 10.0) + Waits(5.0, 0.0, 10.0)
    assert (total.actors_waited, total.input_waited) == (0.3, 0.1)
    assert (Waits().actors_waited, Waits().input_waited) == (0.0, 0.0)
    assert total.total_s == pytest.approx(20.0)
