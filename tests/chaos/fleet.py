"""A job under Ray whose processes are killed: `python -m tests.chaos.fleet FOLDER [ADDRESS STEP_S [SHARD]]` is one
attempt of it or of one of its shards, under a Ray of its own or the one at that address (empty: its own).

Real reading, decoding, graph, saving and publishing; the pair is a fake whose steps take some milliseconds, so that
there is something to kill.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import yaml

from configs.schema import CaptionJobConfig
from decoding.types import Completion, Request
from jobs import caption
from jobs.terminal.command import Command
from pipeline.media.image_decoding import decode_table
from pipeline.reports import summary
from pipeline.run.execution import run_job
from pipeline.run.graph import CaptionStages, RunContext, caption_dataset
from pipeline.run.plan import Plan
from tests.actors.fakes import FakeEngine, FakePair
from tests.pipeline.attempts import job, plan_of

NUM_ROWS, BATCH_ROWS = 800, 20
STEP_S = 0.004


class PacedEngine(FakeEngine):
    """Takes its time for a step, and notes every row that it is given."""

    def __init__(self, slots: int, admitted: Path, step_s: float) -> None:
        super().__init__(slots)
        self.admitted, self.step_s = admitted, step_s

    def submit(self, request: Request) -> None:
        with self.admitted.open("ab") as file:
            file.write(b".")
        super().submit(request)

    def step(self) -> list[Completion]:
        time.sleep(self.step_s)
        return super().step()


class PacedPair(FakePair):
    """Gives such engines."""

    def __init__(self, admitted: Path, step_s: float) -> None:
        super().__init__()
        self.admitted, self.step_s = admitted, step_s

    def engine(self, slots: int) -> FakeEngine:
        return PacedEngine(slots, self.admitted, self.step_s)


class LoadPaced:
    """Travels to the actors."""

    def __init__(self, admitted: Path, step_s: float = STEP_S) -> None:
        self.admitted, self.step_s = admitted, step_s

    def __call__(self, config: CaptionJobConfig, num_threads: int | None) -> FakePair:
        return PacedPair(self.admitted, self.step_s)


def config_in(folder: Path, num_rows: int = NUM_ROWS) -> CaptionJobConfig:
    """The job in a folder: lines of text in two files, two batches at a time in one actor."""
    source = folder / "in"
    if not source.exists():
        source.mkdir(parents=True)
        for file in range(2):
            (source / f"{file}.txt").write_text("".join(f"row {row}\n" for row in range(num_rows // 2)))
    return job(
        {"kind": "text", "path": str(source), "span_max_rows": 100},
        folder / "out",
        pool={"slots": 8, "batch_rows": BATCH_ROWS, "max_batches_in_flight": 2},
        sink={"rows_per_file": 200, "max_unsaved_seconds": 0.0},
        job={"num_cpus": 2, "progress": False},
    )


def run(config: CaptionJobConfig, load: Any, decode_rows: Callable[..., pa.Table] = decode_table) -> summary.Summary:
    """One attempt, to the end."""
    return run_plan(plan_of(config), load, decode_rows)


def run_plan(plan: Plan, load: Any, decode_rows: Callable[..., pa.Table] = decode_table) -> summary.Summary:
    """One attempt of a checked job, to the end."""

    def build(plan: Any, run: RunContext) -> Any:
        def decode(table: Any, options: Any = plan.decode_options, present: Any = plan.present_ids) -> Any:
            return decode_rows(table, options, present)

        source, config = plan.datasource, plan.config
        return caption_dataset(config, source, source.num_spans, CaptionStages(decode, plan.schema, load), run)

    return run_job(plan, build)


def main(arguments: list[str]) -> int:
    """The job as a command of its own, with what every job's command does about signals and failures."""
    folder, step_s = Path(arguments[0]), STEP_S
    if len(arguments) > 1:
        if arguments[1]:
            ray.init(address=arguments[1], log_to_driver=False)
        step_s = float(arguments[2])
    config = folder / "job.yaml"
    config.write_text(yaml.safe_dump(config_in(folder).resolved()))
    command = Command(
        name="tests.chaos.fleet",
        verb="captioning",
        doc="",
        example="",
        model=CaptionJobConfig,
        make_plan=lambda config, limit, runs, resume, shard, folder: plan_of(config, resume, limit, shard=shard),
        describe=lambda _: [],
        run=lambda plan: run_plan(plan, LoadPaced(folder / "admitted", step_s)),
        build=caption.results,
    )
    return command.main(["--config", str(config), *(["--shard", arguments[3]] if len(arguments) > 3 else [])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
