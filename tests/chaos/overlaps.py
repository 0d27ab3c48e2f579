"""Attempts that overlap: two alive at once, one delayed before or within its end, one frozen while a later one runs,
one that receives a stop signal, and a store that lost its conditional put. In the end every id is there exactly once.

    python -m tests.chaos.overlaps [NUM_RUNS]    # 100 by default; writes tests/chaos/overlaps.json

As in tests.chaos.kills a process reads, decodes, answers, spools and publishes by itself, without Ray and without a
model. Signals under Ray are tried in tests/jobs/test_signals.py.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from pipeline.check.output import check_output
from pipeline.cluster import signals
from pipeline.output.publishing import Fenced, Publisher
from pipeline.run.job_plan import DEFAULT_RESUME, ResumeOptions
from pipeline.run.plan import check_plan
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.shard import WHOLE, Shard
from tests.chaos import kills
from tests.object_store import make_bucket, running
from tests.pipeline.attempts import at_rest, job, plan_of, rows_in

NUM_ROWS, ROWS_PER_FILE, SPAN_ROWS = 300, 60, 50
RESULTS = Path(__file__).parent / "overlaps.json"
PHASES = (*kills.PHASES, "looked")
"""Where an attempt is held up or stopped; `looked` is between a look at the attempts and the act that follows, and
`within settling` before such a look."""
WHERE = {
    "overlapping": PHASES,
    "delayed": ("before settling", "within settling"),
    "frozen": (*PHASES, "before settling", "within settling"),
    "stopped": kills.PHASES,
}
KINDS = (*["overlapping"] * 6, *["delayed"] * 6, *["frozen"] * 4, *["stopped"] * 3, "unconditional")
"""Of twenty runs."""
DONE, FAILED, REFUSED, FENCED = 0, 1, 2, 4
MAX_PLACE = 6
NUM_SHARDS = 3
BUCKET = "chaos"


class Gate(kills.Reaper):
    """Does something to its own process when a phase begins for the n-th time."""

    def __init__(self, phase: str, index: int, act: Callable[[], None]) -> None:
        super().__init__(phase, index)
        self.act = act

    def pass_by(self, phase: str) -> None:
        self.seen[phase] += 1
        if phase == self.phase and self.seen[phase] == self.place:
            self.act()


def attempt(config: CaptionJobConfig, admitted: Path, gate: kills.Reaper, resume: ResumeOptions, shard: Shard) -> None:
    """One attempt whose looks and whose end pass by the gate too; only in a process of its own."""
    looks, settles = Publisher.check_alone, kills.end
    is_settling = False

    def look(publisher: Publisher) -> None:
        if is_settling:
            gate.pass_by("within settling")
        looks(publisher)
        gate.pass_by("looked")

    def finalize(*arguments: Any) -> Any:
        nonlocal is_settling
        gate.pass_by("before settling")
        is_settling = True
        return settles(*arguments)

    Publisher.check_alone, kills.end = look, finalize  # type: ignore[method-assign]
    kills.attempt(config, admitted, gate, resume, shard)


def fork(
    config: CaptionJobConfig,
    admitted: Path,
    gate: kills.Reaper,
    resume: ResumeOptions = DEFAULT_RESUME,
    shard: Shard = WHOLE,
) -> int:
    """Start an attempt in a process of its own; gives its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which hold nothing here
        child = os.fork()
    if child:
        return child
    code = FAILED
    try:
        with signals.catch_signals() as stop:
            try:
                attempt(config, admitted, gate, resume, shard)
                code = DONE
            except Fenced:
                code = FENCED
            except ConfigError as error:
                code = REFUSED if "another job has taken attempt" in str(error) else FAILED
            except KeyboardInterrupt:
                code = stop.status
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """The exit code of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


Start = Callable[[kills.Reaper], int]
"""Starts an attempt that passes by this gate; gives its process id."""
NEVER = -1
"""In place of the later attempt's exit code: the gate was not reached, so none was started."""


def hold_up(start: Start, gate: Gate) -> list[int]:
    """Run an attempt that stops itself (SIGSTOP) at the gate, a later one while it is frozen, and resume it; return
    the exit codes of both."""
    gate.act = lambda: os.kill(os.getpid(), signal.SIGSTOP)
    child = start(gate)
    _, status = os.waitpid(child, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        return [os.waitstatus_to_exitcode(status), NEVER]
    code = wait(start(kills.Reaper()))
    os.kill(child, signal.SIGCONT)
    return [wait(child), code]


def overlap(start: Start, gate: Gate) -> list[int]:
    """Run an attempt and, from the gate on, a later one beside it; gives the exit codes of both."""
    passed, tell = os.pipe()

    def act() -> None:
        os.write(tell, b".")

    gate.act = act
    child = start(gate)
    os.close(tell)
    with os.fdopen(passed, "rb", buffering=0) as end:
        if not end.read(1):  # closed by the end of the process
            return [wait(child), NEVER]
    other = start(kills.Reaper())
    return [wait(child), wait(other)]


def stop(start: Start, gate: Gate) -> list[int]:
    """Run an attempt that gets SIGTERM at the gate, and then a later one; gives the exit codes of both."""
    gate.act = lambda: os.kill(os.getpid(), signal.SIGTERM)
    code = wait(start(gate))
    return [code, NEVER if code == DONE else wait(start(kills.Reaper()))]


ACTS: dict[str, Callable[[Start, Gate], list[int]]] = {
    "overlapping": overlap,
    "delayed": hold_up,
    "frozen": hold_up,
    "stopped": stop,
}
ENDINGS = {"overlapping": (FENCED, DONE), "delayed": (FENCED,), "frozen": (FENCED,), "stopped": (128 + signal.SIGTERM,)}
"""How the first attempt may end; one beside which another began is done if it saw its end first."""

EXCEPTIONS = {"looked": (DONE,), "temporary file written": (REFUSED,)}
"""After the last look an attempt is done; before its own record is there, another takes its number."""


def exceptions(phase: str, index: int, is_shard: bool) -> tuple[int, ...]:
    """Further endings of the first attempt. The first file of a shard is the content of the output, which precedes the
    record of the attempt."""
    if is_shard and (phase, index) == ("renamed but unreported", 1):
        return (REFUSED,)
    return EXCEPTIONS.get(phase, ())


def run_one(folder: Path, kind: str, chance: random.Random) -> dict[str, Any]:
    """One run; gives what happened."""
    phase, check_index, retries = chance.choice(WHERE[kind]), chance.randint(1, MAX_PLACE), chance.random() < 0.5
    total = chance.choice((1, 1, NUM_SHARDS))
    shard, *others = chance.sample([Shard(number, total) for number in range(total)], total)
    while True:
        config, admitted, resume = job_in(folder), folder / "admitted", ResumeOptions(retry_errors=retries)

        def start(gate: kills.Reaper) -> int:
            return fork(config, admitted, gate, resume, shard)  # noqa: B023

        if retries:  # there are error rows, which are made again and taken out of their files
            assert wait(start(kills.Reaper())) == DONE
        codes = ACTS[kind](start, Gate(phase, check_index, lambda: None))
        if codes[1] != NEVER:
            break
        assert codes[0] == DONE, f"the attempt ended with {codes[0]}"
        if check_index == 1:
            assert retries, f"there is no phase {phase!r}"
            assert others, f"there is no phase {phase!r}"
            retries = False  # the shard has no error rows
        check_index = max(1, check_index // 2)  # the phase did not come so often
        shutil.rmtree(folder)
    assert codes[0] in (*ENDINGS[kind], *exceptions(phase, check_index, bool(others))), (
        f"the first attempt ended with {codes[0]}: {kind}, {phase} {check_index}"
    )
    assert codes[1] == DONE, f"the later attempt ended with {codes[1]}: {kind}, {phase} {check_index}"
    for other in others:
        assert wait(fork(config, admitted, kills.Reaper(), resume, other)) == DONE
    judge(folder)
    assert wait(start(kills.Reaper())) == DONE  # what the first one spooled late is removed
    at_rest(folder / "out")
    judge(folder)
    problems = check_output(OutputDir(config.sink.path)).problems
    assert problems == [], problems
    result = {"kind": kind, "phase": phase, "place": check_index, "retries": retries, "exit_codes": codes}
    return result | ({"shard": f"{shard}"} if others else {})


def job_in(folder: Path, path: str = "") -> CaptionJobConfig:
    """The job in a folder: rows in two files, of which some fail."""
    (folder / "in").mkdir(parents=True)
    for file in range(2):
        lines = "".join(f"row {row} of {file}\n" for row in range(NUM_ROWS // 2))
        (folder / f"in/{file}.txt").write_text(lines)
    source = {"kind": "text", "path": str(folder / "in"), "span_max_rows": SPAN_ROWS}
    return job(source, path or folder / "out", sink={"rows_per_file": ROWS_PER_FILE})


def every_id() -> set[str]:
    return {f"{file}.txt#{row}" for file in range(2) for row in range(NUM_ROWS // 2)}


def judge(folder: Path) -> None:
    """Every id is there exactly once, as a reader of `data/` and `errors/` finds it."""
    good, bad = rows_in(folder / "out/data"), rows_in(folder / "out/errors")
    assert not good.keys() & bad.keys(), "ids are in both folders"
    assert good.keys() | bad.keys() == every_id(), f"{len(every_id() - good.keys() - bad.keys())} ids are lost"
    assert {own for own in every_id() if own.endswith("77")} == bad.keys()


def run_unconditional(folder: Path) -> dict[str, Any]:
    """A store that lets a file be created twice is refused at the start, with nothing written; then it is mended."""
    store, filesystem = running(), make_bucket(BUCKET)
    config = job_in(folder, f"s3://{BUCKET}/out")
    refused = ""
    with store.without_conditional_put():
        try:
            check_plan(plan_of(config), probe_output=True)
        except ConfigError as error:
            refused = str(error)
    assert "has no conditional put" in refused, refused or "it was not refused"
    assert filesystem.find(BUCKET) == []
    check_plan(plan_of(config), probe_output=True)
    kills.attempt(config, folder / "admitted", kills.Reaper())
    filesystem.get(f"{BUCKET}/out", str(folder / "out"), recursive=True)
    judge(folder)
    return {"kind": "unconditional", "exit_codes": [REFUSED, DONE]}


def run(root: Path, num_runs: int, seed: int) -> dict[str, Any]:
    """So many runs, of every kind in turn."""
    chance = random.Random(seed)
    runs: list[dict[str, Any]] = []
    began_s = time.monotonic()
    for number in range(num_runs):
        kind = KINDS[number * 7 % len(KINDS)]
        folder = root / str(number)
        runs.append(run_unconditional(folder) if kind == "unconditional" else run_one(folder, kind, chance))
        shutil.rmtree(folder)
    return {
        "num_rows": NUM_ROWS,
        "num_runs": num_runs,
        "runs_by_kind": dict(sorted(Counter(run["kind"] for run in runs).items())),
        "num_with_shards": sum("shard" in run for run in runs),
        "num_fenced": sum(run["exit_codes"][0] == FENCED for run in runs),
        "num_stopped": sum(run["exit_codes"][0] == 128 + signal.SIGTERM for run in runs),
        "seed": seed,
        "wall_s": round(time.monotonic() - began_s, 1),
        "runs": runs,
    }


def main(arguments: list[str]) -> int:
    num_runs = int(arguments[0]) if arguments else 100
    with tempfile.TemporaryDirectory() as folder:
        results = run(Path(folder), num_runs, seed=2026)
    print(json.dumps({key: value for key, value in results.items() if key != "runs"}, indent=1))
    if num_runs == 100:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
