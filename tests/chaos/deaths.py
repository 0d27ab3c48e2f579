"""The driver, the raylet, the actor and the writer of a job under Ray are killed, and it goes on until it is done.

    python -m tests.chaos.deaths        # writes tests/chaos/deaths.json

Takes some minutes, because each attempt starts a Ray of its own; so it is a part of `make chaos` and not of the tests.
Linux only: processes are found in /proc.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos import fleet
from tests.pipeline.attempts import at_rest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "deaths.json"
PATIENCE_S = 180.0
EVERY = {f"{file}.txt#{row}" for file in range(2) for row in range(fleet.NUM_ROWS // 2)}
MAX_IN_FLIGHT = 2 * 2 * fleet.BATCH_ROWS
"""Batches in the actor, and as many that are finished and being saved."""


def children_of(pid: int) -> dict[int, str]:
    """All processes below one, with their command lines."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                status = (folder / "stat").read_text().rpartition(")")[2].split()
                told = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, IndexError):
                continue
            parents[int(folder.name)] = (int(status[1]), told)
    found: dict[int, str] = {}
    grown = True
    while grown:
        grown = False
        for child, (parent, told) in parents.items():
            if child not in found and (parent == pid or parent in found):
                found[child] = told
                grown = True
    return found


VICTIMS: dict[str, Callable[[int, str], bool]] = {
    "actor": lambda pid, told: "Generate" in told or "MapWorker" in told,
    "writer": lambda pid, told: told.startswith(("ray::spool", "ray::publish")),
    "raylet": lambda pid, told: "/raylet/raylet" in told,
}


def start(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.chaos.fleet", str(folder)]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def num_saved(folder: Path) -> int:
    """Files that hold finished rows."""
    found = [*(folder / "out").glob("*/part-*.parquet"), *(folder / "out/_job/spool").glob("a*/*.parquet")]
    return len(found)


def kill_one(victim: str, driver: subprocess.Popen[bytes], folder: Path) -> bool:
    """Kill a process of this kind once the attempt has saved something; whether there was one before it ended."""
    before, until = num_saved(folder), time.monotonic() + PATIENCE_S
    while driver.poll() is None and time.monotonic() < until:
        if num_saved(folder) <= before + 1 and victim != "writer":
            continue
        chosen = [
            pid for pid, told in children_of(driver.pid).items() if victim != "driver" and VICTIMS[victim](pid, told)
        ]
        for pid in [driver.pid] if victim == "driver" else chosen[:1]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            return True
    return False


def main() -> int:
    killed: list[str] = []
    ended: list[int] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet.config_in(folder)
        for victims in (("driver",), ("raylet",), ("writer", "actor")):  # the last two do not end an attempt
            driver = start(folder)
            killed += [victim for victim in victims if kill_one(victim, driver, folder)]
            ended.append(driver.wait(timeout=PATIENCE_S))
        if ended[-1] != 0:
            ended.append(start(folder).wait(timeout=PATIENCE_S))
        assert ended[-1] == 0, (folder / "log").read_text()[-3000:]
        assert at_rest(folder / "out") == (EVERY, set())
        num_admitted = (folder / "admitted").stat().st_size
    bound = fleet.NUM_ROWS + len(killed) * MAX_IN_FLIGHT
    found = {
        "num_rows": fleet.NUM_ROWS,
        "killed": killed,
        "exit_codes": ended,
        "num_admitted": num_admitted,
        "num_bound": bound,
        "every_row_once": True,
    }
    print(json.dumps(found, indent=1))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    assert num_admitted <= bound
    return 0


if __name__ == "__main__":
    sys.exit(main())
