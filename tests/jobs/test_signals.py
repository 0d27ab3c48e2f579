"""A job under Ray that receives SIGTERM or SIGINT saves finished rows, exits with 143 or 130, and can be resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray

from tests.chaos import deaths, fleet
from tests.pipeline.attempts import at_rest
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]

NUM_ROWS, STEP_S = 400, 0.02


@pytest.mark.parametrize(
    ("number", "status", "joins"),
    [(signal.SIGTERM, 143, True), (signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)],
)
def test_a_stopped_job_saves_finished_rows_and_resumes(tmp_path: Path, number: int, status: int, joins: bool) -> None:
    folder = tmp_path / "job"
    config = fleet.config_in(folder, NUM_ROWS)
    address = ray.get_runtime_context().gcs_address if joins else ""  # or a Ray of its own, whose handler is kept out
    driver = deaths.start(folder, address, str(STEP_S))
    until(lambda: deaths.num_saved(folder), (folder / "log").read_text, driver)
    os.kill(driver.pid, number)
    assert driver.wait(PATIENCE_S) == status, (folder / "log").read_text()[-3000:]
    log = (folder / "log").read_text()
    assert f"the job was stopped by {signal.Signals(number).name}; finished rows are kept in" in log
    assert "Traceback" not in log
    assert "received at time" not in log, "the handler of Ray's native side ends the process three seconds later"
    assert not (folder / "out/_job/summary.json").exists(), "the job ended before the stop signal"
    assert deaths.num_saved(folder) > 0
    fleet.run(config, fleet.LoadPaced(folder / "admitted", 0.0))
    assert len(at_rest(folder / "out")[0]) == NUM_ROWS
    assert NUM_ROWS <= (folder / "admitted").stat().st_size <= NUM_ROWS + deaths.MAX_IN_FLIGHT
