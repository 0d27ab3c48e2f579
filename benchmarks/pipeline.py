"""Whole jobs from files to files: rows per second, and the share of the time in which the engine is at work.

    python -m benchmarks.pipeline            # 2,048 scenes, every method twice; writes results/pipeline.json; minutes
    python -m benchmarks.pipeline --quick    # 64 scenes, printed only

The zoo's captioning pair on scenes like the demo's, one actor, a private Ray. Counted is from the first task to the
last file, loading the models included. They are small, so that reading, decoding, prompts and writing weigh more than
they do with large ones: a lower bound for the share. The engine is at work while it reads prompts, drafts, verifies and
commits; encoding pictures is not counted. After a short job that nobody counts, the jobs take turns. One counts only if
it made every row, and its texts are plain decoding's, row by row.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peer_rounds import turns
from benchmarks.peers import cores, cpu_name
from benchmarks.pipeline_tables import pipeline_table
from configs.load import load_job
from configs.schema import CaptionJob, Job
from jobs import caption
from pipeline.cluster import ray_session
from pipeline.reports.summary import read_tables
from pipeline.run.plan import make_plan
from pipeline.storage.output_dir import DATA, OutputDir
from zoo.demo import NO_QUESTION, NOT_AN_IMAGE, TRUNCATED, draw_rows, write_parquet

RESULTS = Path(__file__).parent / "results" / "pipeline.json"
CONFIG = Path("configs/jobs/demo_caption.yaml")
ROWS_PER_SHARD = 128
SEED = 5
METHODS = {
    "plain": ("method.drafter.kind=none",),
    "chain of 5": (),
    "controller": ("method.controller.kind=measured",),
}
COMPILE = ("never", "auto")
FIRST = "plain, never"
"""Whose texts the others are held to."""


def run_job(
    folder: Path, name: str, overrides: tuple[str, ...], source: str = "source"
) -> tuple[dict[str, Any], dict[str, str]]:
    """One job over the scenes in `folder`: its figures, and its texts by id."""
    output = folder / name
    places = (f"source.path={folder}/{source}", f"sink.path={output}", "job.progress=false")
    config = load_job(CaptionJob, CONFIG, (*overrides, *places))
    told = caption.run(make_plan(config))
    texts: dict[str, str] = {}
    for table in read_tables(OutputDir(str(output)), (DATA,), ["sample_id", "generated_text"]):
        texts |= {row["sample_id"]: row["generated_text"] for row in table.to_pylist()}
    row = {
        "num_rows": told.num_made,
        "wall_s": told.wall_s,
        "engine_s": told.engine_s,
        "num_tokens": told.num_tokens_made,
        "acceptance_length": told.mean_acceptance_length,
        "actors_waited_share": told.waits.actors_waited,
    }
    return row, texts


def label_of(row: dict[str, Any]) -> str:
    """Which of the jobs a row is of."""
    return f"{row['method']}, {row['compile']}"


def main(arguments: list[str] | None = None) -> int:
    """Run; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="64 scenes; nothing is written")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args(arguments)
    num_rows, repeats = (64, 1) if options.quick else (options.rows, options.repeats)
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary, ray_session.session(Job()):
        folder = Path(temporary)
        scenes = [
            row
            for place, row in enumerate(draw_rows(num_rows, SEED))
            if place not in (NOT_AN_IMAGE, TRUNCATED, NO_QUESTION)
        ]
        for name, some in (("source", scenes), ("first", scenes[:ROWS_PER_SHARD])):
            (folder / name).mkdir()
            for number, start in enumerate(range(0, len(some), ROWS_PER_SHARD)):
                write_parquet(some[start : start + ROWS_PER_SHARD], folder / name / f"shard-{number:03}")
        jobs = {f"{name}, {compiles}": (name, compiles) for name in METHODS for compiles in COMPILE}
        run_job(folder, "warm", (*METHODS["plain"], "pool.compile=never"), "first")
        found_texts: list[dict[str, str]] = []
        for number, order in enumerate(turns(list(jobs), repeats)):
            for label in order:
                name, compiles = jobs[label]
                place = f"{label}, {number}".replace(",", "").replace(" ", "-")
                told, texts = run_job(folder, place, (*METHODS[name], f"pool.compile={compiles}"))
                found_texts.append(texts)
                rows.append({**told, "method": name, "compile": compiles})
                print(f"{place}: {told}", file=sys.stderr, flush=True)
    wanted = next(texts for row, texts in zip(rows, found_texts, strict=True) if label_of(row) == FIRST)
    for row, texts in zip(rows, found_texts, strict=True):
        row["num_equal"] = len(texts.items() & wanted.items())
    rows.sort(key=lambda row: list(jobs).index(label_of(row)))
    found = {
        "machine": f"{cpu_name()}, {len(cores())} cores, load {load:.1f} at the start",
        "num_scenes": len(scenes),
        "rows": rows,
    }
    print(pipeline_table(found))
    if not options.quick:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
