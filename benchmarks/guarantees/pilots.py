"""Compares pilots of 64 rows with one whole run on the shipped text pair: whether their intervals contain its cost.

    python -m benchmarks.guarantees.pilots     # writes results/pilots.json; ten pilots and 20,000 rows, hours on a CPU
    python -m benchmarks.guarantees.pilots --rows 320 --pilots 2 --samples 16     # a trial, which writes nothing

Each pilot draws other rows of the same source and plans all of its rows (`draftfleet estimate --rows`). The whole run
decodes them with the same method on one engine. Its cost is the time in which the engine had rows. At a level of 90 %,
nine of ten intervals contain it on average.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from actors.results import torch_threads
from benchmarks.harness.markdown import Results
from benchmarks.harness.results import command_line, machine, progress, results_file
from benchmarks.tables.parts import finish
from configs.load import validate
from configs.pool import JobSectionConfig
from configs.schema import CaptionJobConfig
from jobs import caption
from pipeline.cluster import ray_session
from pipeline.pilot import estimate
from pipeline.pilot.repeats import repeated
from pipeline.pilot.run import run_pilot
from pipeline.run.plan import make_plan
from zoo.pair import CHECKPOINTS
from zoo.text import held_out_questions
from zoo.world import listing

RESULTS = results_file("pilots")
NUM_ROWS, NUM_PILOTS, NUM_SAMPLES = 20_000, 10, 64
NUM_QUESTIONS = 512
ROWS_PER_SPAN, SLOTS = 200, 16
SECONDS_PER_HOUR = 3600


def job_of(folder: Path, output: Path) -> CaptionJobConfig:
    """Return a job of the shipped text pair with a chain of drafts on the lines of `prompts.txt`."""
    models = {
        name: {"path": str(CHECKPOINTS / f"text_{name}"), "dtype": "float32", "device": "cpu"}
        for name in ("target", "drafter")
    }
    data = {
        "source": {"kind": "text", "path": str(folder / "prompts.txt"), "span_max_rows": ROWS_PER_SPAN},
        "prompt": "{text}",
        "model": models,
        "method": {"name": "chain", "drafter": {"kind": "model"}, "tree": {"kind": "chain", "length": 5}},
        "sampling": {"max_new_tokens": 96},
        "pool": {"slots": SLOTS, "max_context_tokens": 512, "compile": "never", "torch_threads": 1},
        "job": {"progress": False},
        "sink": {"path": str(output)},
    }
    return validate(CaptionJobConfig, data, "benchmarks.guarantees.pilots")


def run_one(folder: Path, number: int, num_pilots: int, num_samples: int, num_rows: int) -> dict[str, Any]:
    """Run the pilot `number`, which draws rows that other pilots do not draw, and return its estimate of the cost."""
    plan = make_plan(job_of(folder, folder / f"pilot-{number}"), runs=False)
    method, pool = plan.config.method, plan.config.pool
    drawn = estimate.draw(plan.datasource, num_samples, (number + 0.5) / num_pilots)
    pilot = repeated(drawn, method, pool)
    rows, verdict = run_pilot(plan, caption.results, pilot)
    made = estimate.estimate(pilot, rows, pool, torch_threads(pool), None, number, verdict, method.label, num_rows)
    cost = made.engine_hours.times(SECONDS_PER_HOUR)
    return {"value": cost.value, "low": cost.low, "high": cost.high, "has_verdict": verdict is not None}


def main(arguments: list[str] | None = None) -> int:
    """Run the pilots and the whole job, print in how many the interval contains its cost, and write the results."""
    parser = command_line("guarantees.pilots", __doc__)
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--pilots", type=int, default=NUM_PILOTS)
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    options = parser.parse_args(arguments)
    disable_progress_bar()
    results: Results = {"machine": machine(), "torch": torch.__version__, "level": estimate.LEVEL, **vars(options)}
    with tempfile.TemporaryDirectory() as temporary, ray_session.session(JobSectionConfig()):
        folder = Path(temporary)
        asked = [listing.write_prompt(*question) for question in held_out_questions(NUM_QUESTIONS, 7)]
        lines = [f"{asked[row % len(asked)]}\n" for row in range(options.rows)]
        (folder / "prompts.txt").write_text("".join(lines), encoding="utf-8")
        pilots = []
        for number in range(options.pilots):
            pilots.append(run_one(folder, number, options.pilots, options.samples, options.rows))
            progress(f"pilot {number + 1}", pilots[-1])
        done = caption.run(make_plan(job_of(folder, folder / "whole")))
    engine_s = done.waits.total_s - done.waits.idle_s
    num_held = sum(pilot["low"] <= engine_s <= pilot["high"] for pilot in pilots)
    progress(f"the whole run took {engine_s:.1f} engine seconds; {num_held} of {len(pilots)} intervals contain it")
    results |= {"pilots": pilots, "engine_s": engine_s, "num_held": num_held, "num_done": done.num_samples}
    is_whole = (options.rows, options.pilots, options.samples) == (NUM_ROWS, NUM_PILOTS, NUM_SAMPLES)
    return finish(RESULTS, results) if is_whole else 0


if __name__ == "__main__":
    sys.exit(main())
