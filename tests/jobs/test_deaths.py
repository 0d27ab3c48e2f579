"""A job under Ray whose actor and then driver crash resumes and ends with the result of an undisturbed run.

`make chaos` kills fifty processes; this is the one such job of the suite.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from tests.chaos import deaths, fleet
from tests.pipeline.attempts import at_rest
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]

NUM_ROWS, STEP_S = 400, 0.02


def test_a_job_whose_actor_and_driver_are_killed_resumes_to_every_row_once(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    config = fleet.config_in(folder, NUM_ROWS)
    fleet.run(config, fleet.LoadPaced(folder / "admitted", 0.0))
    expected, sides = deaths.rows_of(folder / "out"), at_rest(folder / "out")
    assert len(expected) == NUM_ROWS
    shutil.rmtree(folder / "out")
    (folder / "admitted").unlink()

    former = generating()
    driver = deaths.start(folder, ray.get_runtime_context().gcs_address, str(STEP_S))
    actor = wait_for(driver, folder, 1, lambda: next(iter(generating() - former), 0))
    os.kill(actor, signal.SIGKILL)
    admitted = (folder / "admitted").stat().st_size
    wait_for(driver, folder, 1, lambda: (folder / "admitted").stat().st_size > admitted + deaths.MAX_IN_FLIGHT)
    driver.kill()
    assert driver.wait(PATIENCE_S) == -signal.SIGKILL, (folder / "log").read_text()[-3000:]
    num_saved = deaths.num_saved(folder)
    assert not (folder / "out/_job/summary.json").exists(), "the job was done before its driver was killed"

    fleet.run(config, fleet.LoadPaced(folder / "admitted", 0.0))
    assert num_saved > 0
    assert at_rest(folder / "out") == sides
    rows = deaths.rows_of(folder / "out")
    assert rows.keys() == expected.keys()
    assert [own for own, row in rows.items() if row != expected[own]] == []
    assert NUM_ROWS <= (folder / "admitted").stat().st_size <= NUM_ROWS + 2 * deaths.MAX_IN_FLIGHT


def generating() -> set[int]:
    """Processes of actors that generate: not below their driver, but below the raylet that this process has started."""
    return {pid for pid, result in deaths.children_of(os.getpid()).items() if deaths.VICTIMS["actor"](pid, result)}


def wait_for(driver: subprocess.Popen[bytes], folder: Path, num_files: int, look: Callable[[], int]) -> int:
    """What `look` finds, once so many files are saved."""
    return until(lambda: look() if deaths.num_saved(folder) >= num_files else 0, (folder / "log").read_text, driver)
