"""A job of 2,000 rows whose driver is killed by SIGKILL, at a random moment of each named phase, and started again
until it is done.

    python -m tests.chaos.kills [NUM_KILLS]    # 50 by default; writes tests/chaos/kills.json

The process that is killed reads, decodes, answers, spools and publishes by itself, without Ray and without a model:
what is tried here is everything around the graph. Deaths of actors under Ray are tried in tests/jobs/test_graph.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa

from configs.schema import CaptionJobConfig
from pipeline.media.image_decoding import decode_table
from pipeline.output.writer import MAX_TASKS, Writer
from pipeline.run.job_plan import DEFAULT_RESUME, ResumeOptions
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.shard import WHOLE, Shard
from tests.pipeline.attempts import answered, at_rest, end, job, plan_of, rows_in, start

NUM_ROWS, BATCH_ROWS, ROWS_PER_FILE = 2_000, 50, 200
PHASES = ("read", "decode", "mid-generation", "temporary file written", "renamed but unreported")
MAX_IN_FLIGHT = (MAX_TASKS + 1) * ROWS_PER_FILE + BATCH_ROWS
"""Rows that a kill can cost: those being written, those held meanwhile, and the batch that is made."""
RESULTS = Path(__file__).parent / "kills.json"
UNCOUNTED = ("attempt",)
"""Columns that may differ from an undisturbed run; rows without an engine have no times."""


class Reaper:
    """Ends its own process when a phase begins for the n-th time; with no phase, never."""

    def __init__(self, phase: str = "", index: int = 0) -> None:
        self.phase, self.place = phase, index
        self.seen: Counter[str] = Counter()

    def pass_by(self, phase: str) -> None:
        self.seen[phase] += 1
        if phase == self.phase and self.seen[phase] == self.place:
            os.kill(os.getpid(), signal.SIGKILL)


def attempt(
    config: CaptionJobConfig,
    admitted: Path,
    reaper: Reaper,
    resume: ResumeOptions = DEFAULT_RESUME,
    shard: Shard = WHOLE,
) -> None:
    """One attempt, from looking at the output to rest; every admitted row is a byte of a file."""
    true = OutputDir._put_local

    def put(output: OutputDir, relative: str, data: Any, publish: Any) -> None:
        def watched(temporary: str, name: str, **folders: int) -> None:
            reaper.pass_by("temporary file written")
            publish(temporary, name, **folders)
            reaper.pass_by("renamed but unreported")

        true(output, relative, data, watched)

    OutputDir._put_local = put  # type: ignore[method-assign]
    try:
        plan, begun = start(plan_of(config, resume, shard=shard))
        waiting = plan.prior.inventory.spooled if plan.prior else []
        with Writer(begun.publisher, config.sink, waiting, begun.next_numbers) as writer:
            for span in range(plan.datasource.num_spans):
                table = plan.datasource.read(span)
                reaper.pass_by("read")
                decoded = decode_table(table, plan.decode_options, plan.present_ids)
                reaper.pass_by("decode")
                for first in range(0, decoded.num_rows, BATCH_ROWS):
                    batch = decoded.slice(first, BATCH_ROWS)
                    with admitted.open("ab") as file:
                        file.write(b"." * batch.num_rows)
                    made: pa.Table = answered(
                        batch,
                        begun.publisher.attempt,
                        lambda own: own.endswith("77"),
                        config.reports_partial,
                    )
                    reaper.pass_by("mid-generation")
                    writer.add([made], made.num_rows, made.nbytes)
        end(plan, begun)
    finally:
        OutputDir._put_local = true  # type: ignore[method-assign]


def in_a_child(config: CaptionJobConfig, admitted: Path, reaper: Reaper) -> int:
    """Run an attempt in a process of its own; gives its exit code, negative for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which hold nothing here
        child = os.fork()
    if child == 0:
        code = 1
        try:
            attempt(config, admitted, reaper)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Kill and resume repeatedly, then compare the final output with that of an undisturbed run."""
    chance = random.Random(seed)
    (folder / "in").mkdir(parents=True)
    for file in range(4):
        lines = "".join(f"row {row} of {file}\n" for row in range(NUM_ROWS // 4))
        (folder / f"in/{file}.txt").write_text(lines)
    source = {"kind": "text", "path": str(folder / "in"), "span_max_rows": 100}
    sink = {"rows_per_file": ROWS_PER_FILE}
    whole = job(source, folder / "whole", sink=sink)
    attempt(whole, folder / "whole.admitted", Reaper())
    kills: list[dict[str, Any]] = []
    number = 0
    admitted = folder / "0.admitted"
    config = job(source, folder / "0", sink=sink)
    finished: list[Path] = []
    began_s = time.monotonic()
    while len(kills) < num_kills:
        phase = PHASES[len(kills) % len(PHASES)]
        # Few, so that most kills come before the job is done. One that comes too late: the next job begins.
        reaper = Reaper(phase, chance.randint(1, 12))
        code = in_a_child(config, admitted, reaper)
        if code == -signal.SIGKILL:
            kills.append({"phase": phase, "at": reaper.place, "job": number})
            continue
        assert code == 0, f"an attempt ended with {code}"
        finished.append(folder / str(number))
        number += 1
        config, admitted = job(source, folder / str(number), sink=sink), folder / f"{number}.admitted"
    if (folder / str(number)).exists():
        assert in_a_child(config, admitted, Reaper()) == 0
        finished.append(folder / str(number))
    return {
        "num_rows": NUM_ROWS,
        "num_kills": len(kills),
        "kills_by_phase": dict(Counter(kill["phase"] for kill in kills)),
        "seed": seed,
        "max_in_flight_rows": MAX_IN_FLIGHT,
        "wall_s": round(time.monotonic() - began_s, 1),
        "jobs": [judge(output, folder / "whole", kills) for output in finished],
    }


def judge(output: Path, whole: Path, kills: list[dict[str, Any]]) -> dict[str, Any]:
    """What one job came to; every id once, and every column as it would have been."""
    assert at_rest(output) == at_rest(whole)
    for side in ("data", "errors"):
        rows, expected = rows_in(output / side), rows_in(whole / side)
        different = [own for own, row in rows.items() if comparable(row) != comparable(expected[own])]
        assert different == [], f"{len(different)} rows differ, the first is {different[0]}"
    own = sum(kill["job"] == int(output.name) for kill in kills)
    num_admitted = (output.parent / f"{output.name}.admitted").stat().st_size
    assert num_admitted <= NUM_ROWS + own * MAX_IN_FLIGHT
    return {"num_kills": own, "num_admitted": num_admitted, "num_bound": NUM_ROWS + own * MAX_IN_FLIGHT}


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in UNCOUNTED}


def main() -> int:
    num_kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory() as folder:
        results = run(Path(folder), num_kills, seed=2026)
    print(json.dumps(results, indent=1))
    if num_kills == 50:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
