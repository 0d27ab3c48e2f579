"""The driver, the raylet, the actor and the writer of jobs under Ray are killed at random moments, or the driver is
frozen while another attempt overtakes it, and the jobs go on until they are done. Every other job has two shards.

    python -m tests.chaos.deaths [NUM_KILLS]    # 50 by default; writes tests/chaos/deaths.json

Takes many minutes, because each attempt starts a Ray of its own; so it is a part of `make chaos` and not of the tests,
of which one job like it is in tests/jobs/test_deaths.py.
Linux only: processes are found in /proc.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos import fleet
from tests.pipeline.attempts import at_rest, rows_in

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "deaths.json"
NUM_ROWS = 2_000
PATIENCE_S = 900.0
MAX_IN_FLIGHT = 2 * 2 * fleet.BATCH_ROWS
"""Batches in the actor, and as many that are finished and being saved."""
MAX_ACTOR_KILLS = 2
"""In one attempt: at the third a row that ran alone would be blamed, as it should be."""
MAX_FILES = 12
"""A kill comes after at most so many further files."""
NUM_SHARDS = 2
KINDS = ("driver", "actor", "raylet", "writer", "frozen driver")
MAX_FROZEN_ROWS = 200 + MAX_IN_FLIGHT
"""Rows that a frozen driver still makes after it wakes, until it publishes a file and is fenced out."""
UNCOUNTED = ("attempt", "telemetry")
"""Columns that may differ from an undisturbed run: the telemetry of a fake is times."""


def children_of(pid: int) -> dict[int, str]:
    """All processes below one, with their command lines."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                status = (folder / "stat").read_text().rpartition(")")[2].split()
                result = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, IndexError):
                continue
            parents[int(folder.name)] = (int(status[1]), result)
    processes: dict[int, str] = {}
    grown = True
    while grown:
        grown = False
        for child, (parent, result) in parents.items():
            if child not in processes and (parent == pid or parent in processes):
                processes[child] = result
                grown = True
    return processes


VICTIMS: dict[str, Callable[[int, str], bool]] = {
    "actor": lambda pid, command: "Generate" in command or "MapWorker" in command,
    "writer": lambda pid, command: command.startswith(("ray::spool", "ray::write", "ray::Publisher.publish")),
    "raylet": lambda pid, command: "/raylet/raylet" in command,
}


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """A driver; see `tests.chaos.fleet` for its options."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.chaos.fleet", str(folder), *options]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            # A shell that starts this in the background has it ignore SIGINT, and its children would as well.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        )


def num_saved(folder: Path) -> int:
    """Files that hold finished rows."""
    patterns = ("*/*part-*.parquet", "_job/spool/a*/*.parquet", "_job/shards/*/spool/a*/*.parquet")
    return sum(len(list((folder / "out").glob(pattern))) for pattern in patterns)


def kill_one(victim: str, driver: subprocess.Popen[bytes], folder: Path, num_files: int) -> bool:
    """Kill or freeze a process of this kind once the attempt has changed what is saved so many times; whether there was
    one."""
    is_driver, number = victim.endswith("driver"), signal.SIGSTOP if victim == "frozen driver" else signal.SIGKILL
    seen, changes, until = num_saved(folder), 0, time.monotonic() + PATIENCE_S
    while driver.poll() is None and time.monotonic() < until:
        now = num_saved(folder)
        changes, seen = changes + (now != seen), now
        if changes < num_files:
            continue
        processes = {driver.pid: "driver"} if is_driver else children_of(driver.pid)
        for pid in [pid for pid, result in processes.items() if is_driver or VICTIMS[victim](pid, result)][:1]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
            return True
    return False


def attempt(folder: Path, chance: random.Random, victims: list[str], killed: list[str], shard: str) -> list[int]:
    """One attempt of a shard, in which the next victims die one by one while it lives; its exit code. A frozen driver
    wakes after another attempt has ended, whose exit code is before its own."""
    options = ("", str(fleet.STEP_S), shard)
    driver = start(folder, *options)
    here = 0
    while victims and driver.poll() is None:
        if victims[0] == "actor" and here == MAX_ACTOR_KILLS:
            break
        if not kill_one(victims[0], driver, folder, chance.randint(1, MAX_FILES)):
            break
        killed.append(victims.pop(0))
        here += killed[-1] == "actor"
        if killed[-1] == "frozen driver":
            try:
                other = start(folder, *options).wait(timeout=PATIENCE_S)
            finally:
                driver.send_signal(signal.SIGCONT)
            return [other, driver.wait(timeout=PATIENCE_S)]
        if killed[-1] in ("driver", "raylet"):
            break
    return [driver.wait(timeout=PATIENCE_S)]


def rows_of(output: Path) -> dict[str, dict[str, Any]]:
    """All rows by id, without what may differ."""
    rows = {**rows_in(output / "data"), **rows_in(output / "errors")}
    return {own: {name: row[name] for name in row if name not in UNCOUNTED} for own, row in rows.items()}


def run(root: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Kill, go on, kill, …; every job is compared with an undisturbed one."""
    chance = random.Random(seed)
    victims = [KINDS[index % len(KINDS)] for index in range(num_kills)]
    chance.shuffle(victims)
    folder = root / "job"  # one after another in the same place, which their fingerprints name
    fleet.config_in(folder, NUM_ROWS)
    assert attempt(folder, chance, [], [], "0/1") == [0], _log(folder)
    expected, sides = rows_of(folder / "out"), at_rest(folder / "out")
    assert len(expected) == NUM_ROWS
    jobs: list[dict[str, Any]] = []
    began_s = time.monotonic()
    while victims:
        shutil.rmtree(folder / "out")
        (folder / "admitted").unlink()
        killed: list[str] = []
        codes: list[int] = []
        num_shards = NUM_SHARDS if len(jobs) % 2 else 1
        left = [f"{number}/{num_shards}" for number in range(num_shards)]
        while left:
            assert len(codes) <= len(killed) + killed.count("frozen driver") + num_shards, _log(folder)
            shard = chance.choice(left)
            codes += attempt(folder, chance, victims, killed, shard)
            if codes[-1] == 0:
                left.remove(shard)
        assert at_rest(folder / "out") == sides
        rows = rows_of(folder / "out")
        assert rows.keys() == expected.keys()
        assert not list((folder / "out").rglob("aside/**/*part-*")), "a published file was set aside"
        other = {name for own, row in rows.items() for name in row if row[name] != expected[own][name]}
        assert not other, f"columns that differ from an undisturbed run: {sorted(other)}"
        num_admitted = (folder / "admitted").stat().st_size
        bound = NUM_ROWS + len(killed) * MAX_IN_FLIGHT + killed.count("frozen driver") * MAX_FROZEN_ROWS
        assert num_admitted <= bound, (num_admitted, bound)
        figures = {"exit_codes": codes, "num_admitted": num_admitted, "num_bound": bound}
        jobs.append({"num_shards": num_shards, "killed": killed, **figures})
        print(json.dumps(jobs[-1]), file=sys.stderr, flush=True)
    return {
        "num_rows": NUM_ROWS,
        "num_kills": num_kills,
        "kills_by_process": dict(Counter(victim for job in jobs for victim in job["killed"])),
        "seed": seed,
        "max_in_flight_rows": MAX_IN_FLIGHT,
        "wall_s": round(time.monotonic() - began_s, 1),
        "jobs": jobs,
    }


def _log(folder: Path) -> str:
    return (folder / "log").read_text()[-3000:]


def main(arguments: list[str]) -> int:
    num_kills = int(arguments[0]) if arguments else 50
    with tempfile.TemporaryDirectory() as name:
        results = run(Path(name), num_kills, seed=2026)
    print(json.dumps({key: value for key, value in results.items() if key != "jobs"}, indent=1))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
