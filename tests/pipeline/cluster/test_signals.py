"""SIGTERM and SIGINT: the first one ends a process in order, the second one or the end of the grace period at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from configs.schema import SinkConfig
from pipeline.cluster import signals
from pipeline.output.writer import Writer, _Buffer
from tests.pipeline.output.test_publishing import press_at, result_table

ROOT = Path(__file__).resolve().parents[3]
LONG_S = 300
SCRIPT = """
import signal, sys, time
from pipeline.cluster import signals as stopping
with stopping.catch_signals({grace_s}) as stop:
    try:
        print("ready", flush=True)
        time.sleep({long_s})
    except KeyboardInterrupt:
        print("saving", flush=True)
        if {hangs}:
            time.sleep({long_s})
        print("saved", flush=True)
        sys.exit(stop.status)
"""


def child(grace_s: float = LONG_S, hangs: bool = False, **options: bool) -> subprocess.Popen[str]:
    """A process that saves when it is stopped, for ever where it hangs; returns when it is ready."""
    # A test runner in the background ignores SIGINT, and its children with it.
    how = signal.SIG_IGN if options.get("ignores_int") else signal.SIG_DFL
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(grace_s=grace_s, hangs=hangs, long_s=LONG_S)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, how) and None,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_lets_the_process_save_and_gives_its_own_status(number: int, status: int) -> None:
    process = child()
    process.send_signal(number)
    out, _ = process.communicate(timeout=LONG_S)
    assert (process.returncode, out) == (status, "saving\nsaved\n")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_the_process_at_once(number: int, status: int) -> None:
    process = child(hangs=True)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=LONG_S)
    assert (process.returncode, out) == (status, "")
    assert "ended at once: a second signal came" in err


def test_the_end_of_the_grace_period_ends_a_process_that_does_not_exit() -> None:
    process = child(grace_s=0.2, hangs=True)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LONG_S)
    assert (process.returncode, out) == (143, "saving\n")
    assert "the grace period of 0.2 s is over" in err


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    process = child(ignores_int=True)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=LONG_S)[0] == "saving\nsaved\n"
    assert process.returncode == 143


def test_handlers_are_restored_after_the_block_and_other_threads_set_none() -> None:
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with signals.catch_signals():
        assert signal.getsignal(signal.SIGTERM) != before[0]
        within = signal.getsignal(signal.SIGTERM)
        thread = threading.Thread(target=lambda: signals.catch_signals().__enter__())
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is within
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before


def test_ray_does_not_take_the_handler_away_while_it_connects() -> None:
    from ray._private import utils

    own = utils.set_sigterm_handler
    with signals.catch_signals():
        within = signal.getsignal(signal.SIGTERM)
        with signals.keep_handlers():
            utils.set_sigterm_handler(lambda *_: None)
        assert signal.getsignal(signal.SIGTERM) is within
    assert utils.set_sigterm_handler is own


def test_rows_that_finished_before_a_signal_are_durable_before_the_error_propagates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = SinkConfig(path=str(tmp_path), rows_per_file=4, max_unsaved_seconds=80_000.0)
    publisher, writing, stopped = press_at(tmp_path), threading.Event(), threading.Event()

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        writing.set()
        assert stopped.wait(LONG_S)  # the first file is being written all the while
        return function(*arguments)

    writer = Writer(publisher, sink, call=call, max_tasks=1)
    true = _Buffer.is_full

    def is_full(held: _Buffer, sink: SinkConfig) -> bool:
        if true(held, sink) and threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGTERM)  # while the job waits until its third block is taken
        return true(held, sink)

    monkeypatch.setattr(_Buffer, "is_full", is_full)
    tables = [result_table([f"{block}-{row}" for row in range(4)]) for block in range(3)]

    def fill() -> None:
        with writer:
            try:
                for table in tables:
                    writer.add([table], table.num_rows, table.nbytes)
                    assert writing.wait(LONG_S)
            finally:
                stopped.set()

    with signals.catch_signals() as stop, pytest.raises(KeyboardInterrupt):
        fill()
    assert stop.status == 143
    names = [f"{folder}/{name}" for folder in ("_job/spool", "data") for name in publisher.output.list_files(folder)]
    rows = [own for name in names for own in _ids(tmp_path / name)]
    assert sorted(rows) == [f"{block}-{row}" for block in range(3) for row in range(4)]
    assert len(publisher.output.list_files("data")) == 2, "full files are published, the other rows are spooled"


def _ids(path: Path) -> list[str]:
    return [str(own) for own in pq.read_table(path)["sample_id"].to_pylist()]
