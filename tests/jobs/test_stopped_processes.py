"""Tests that a job writes every row once if its driver and actor are stopped and its actor and bookkeeping killed.

One run for all tests of this module, because each needs a Ray of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.dataset
import pytest

from tests.chaos import deaths, fleet
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS, SILENCE_S, PATIENCE_S = 800, 10.0, 1500.0
"""Upper bound for a failing run only; nothing is timed."""
PROGRAM = """
import sys
from pathlib import Path
from tests.chaos import fleet
from tests.jobs.test_stopped_processes import NUM_ROWS, SILENCE_S

folder = Path(sys.argv[1])
config = fleet.config_in(folder, NUM_ROWS)
job = config.job.model_copy(update={"max_silence_s": SILENCE_S})
fleet.run(config.model_copy(update={"job": job}), fleet.LoadPaced(folder / "admitted", 0.05))
"""
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"), pytest.mark.slow]


@dataclass(frozen=True)
class Run:
    """Outcome of a job that ended: its folder, exit status, terminal output and further observations."""

    folder: Path
    status: int
    terminal: str
    stopped: int
    killed: int
    without_guard: list[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("frozen") / "job"
    fleet.config_in(folder, NUM_ROWS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "terminal").open("wb") as terminal:
        driver = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)], cwd=ROOT, env=environment, stdout=terminal, stderr=terminal
        )
    try:
        stopped = wait_for(
            driver, folder, lambda: deaths.num_saved(folder) and ray_process(driver, deaths.VICTIMS["actor"])
        )
        os.kill(driver.pid, signal.SIGSTOP)
        wait_for(driver, folder, lambda: "T" in state_of(driver.pid))
        os.kill(driver.pid, signal.SIGCONT)
        os.kill(stopped, signal.SIGSTOP)
        without_guard = unguarded(driver)
        admitted = folder / "admitted"
        num_admitted = admitted.stat().st_size
        wait_for(driver, folder, lambda: not Path(f"/proc/{stopped}").exists())
        wait_for(driver, folder, lambda: admitted.stat().st_size > num_admitted)
        killed = wait_for(driver, folder, lambda: ray_process(driver, deaths.VICTIMS["actor"]))
        os.kill(killed, signal.SIGKILL)
        stats = ray_process(driver, lambda pid, result: "_StatsActor" in result)
        if stats:
            os.kill(stats, signal.SIGKILL)
        status = driver.wait(PATIENCE_S)
    finally:
        if driver.poll() is None:
            # Its Ray ends with it.
            driver.kill()
            driver.wait()
    return Run(folder, status, (folder / "terminal").read_text(), stopped, killed, without_guard)


def ray_process(driver: subprocess.Popen[bytes], is_it: Callable[[int, str], bool]) -> int:
    """A process of Ray below the driver; 0 where there is none."""
    return next((pid for pid, result in deaths.children_of(driver.pid).items() if is_it(pid, result)), 0)


def unguarded(driver: subprocess.Popen[bytes]) -> list[str]:
    """Workers of Ray that do something, actors and tasks alike, and that nothing guards."""
    processes = deaths.children_of(driver.pid)
    others = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
    workers = [pid for pid, result in processes.items() if result.startswith("ray::") and not result.startswith(others)]
    bare = [pid for pid in workers if not any(" -I -S -c" in result for result in deaths.children_of(pid).values())]
    later = deaths.children_of(driver.pid)  # a task may have ended meanwhile
    return [processes[pid] for pid in bare if later.get(pid) == processes[pid]]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(driver: subprocess.Popen[bytes], folder: Path, look: Callable[[], int | bool]) -> int:
    """What `look` finds, as soon as it finds something while the driver runs."""
    result = until(lambda: driver.poll() is not None or look(), (folder / "terminal").read_text)
    assert driver.poll() is None, (folder / "terminal").read_text()[-3000:]
    return int(result)


def test_every_id_is_made_exactly_once(run: Run) -> None:
    assert run.status == 0, run.terminal[-3000:]
    rows = pyarrow.dataset.dataset(sorted((run.folder / "out/data").glob("*.parquet"))).to_table(["sample_id"])
    counts = Counter(rows.column("sample_id").to_pylist())
    assert len(counts) == NUM_ROWS
    assert set(counts.values()) == {1}
    assert not list((run.folder / "out/errors").glob("*.parquet"))


def test_every_worker_of_ray_is_guarded(run: Run) -> None:
    assert run.without_guard == []


def test_the_terminal_has_one_line_for_each_death_and_no_stack_trace(run: Run) -> None:
    for pid in (run.stopped, run.killed):
        assert run.terminal.count(f"worker process {pid} died") == 1
    assert f"process {run.stopped} sent no heartbeat for {SILENCE_S:g} s" in run.terminal
    for word in ("Traceback", "  File ", "Unhandled", "KeyError", "retries remaining", "Lease ID"):
        assert word not in run.terminal, run.terminal[-3000:]
    path = run.folder / "out/_job/logs/attempt-000001.log"
    own = [line for line in run.terminal.splitlines() if re.search(r"died|heartbeat", line)]
    assert own
    assert all(line.endswith(f"(log: {path})") for line in own)


def test_the_log_has_the_details_that_the_terminal_omits(run: Run) -> None:
    log = (run.folder / "out/_job/logs/attempt-000001.log").read_text()
    for pid in (run.stopped, run.killed):
        assert re.search(rf"Worker PID: {pid}\b", log)
    assert json.loads((run.folder / "out/_job/summary.json").read_text())


def test_max_silence_s_has_a_lower_bound() -> None:
    """The limit is a field of the job with a lower edge."""
    from pydantic import ValidationError

    from configs.pool import JobSectionConfig

    assert JobSectionConfig(max_silence_s=1.0).max_silence_s == 1.0
    assert JobSectionConfig(max_silence_s=None).max_silence_s is None
    with pytest.raises(ValidationError):
        JobSectionConfig(max_silence_s=0.9)
