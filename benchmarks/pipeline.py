"""Measures whole jobs from files to files: rows per second, and the share of the time in which the engine runs.

    python -m benchmarks.pipeline    # 2,048 scenes, every method twice; writes results/pipeline.json; minutes

The zoo's captioning pair, one actor, a private Ray; timed from the first task to the last file, loading included. The
models are small, so reading, decoding, prompts and writing weigh more than with large ones: a lower bound of the
engine's share, which excludes the encoding of images. A job has a speed only if it writes every row with the texts of
plain decoding.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path

from benchmarks.harness.markdown import Results, figure, percent, table
from benchmarks.harness.results import command_line, finish, machine, progress, results_file
from benchmarks.harness.verdict import spread, turns
from configs.load import load_job
from configs.pool import Job
from configs.schema import CaptionJob
from jobs import caption
from pipeline.cluster import ray_session
from pipeline.reports.result_tables import list_tables, read_tables
from pipeline.run.plan import make_plan
from pipeline.storage.output_dir import DATA, OutputDir
from zoo.demo import NO_QUESTION, NOT_AN_IMAGE, TRUNCATED, draw_rows, write_parquet

RESULTS = results_file("pipeline")
CONFIG = Path("configs/jobs/demo_caption.yaml")
ROWS_PER_SHARD = 128
SEED = 5
METHODS = {
    "plain": ("method.drafter.kind=none",),
    "chain of 5": (),
    "controller": ("method.controller.kind=measured",),
}
COMPILE = ("never", "auto")
FIRST = ("plain", "never")
"""The job whose texts the others must equal."""


def run_job(folder: Path, name: str, overrides: tuple[str, ...], source: str) -> tuple[Results, dict[str, str]]:
    """Run one job over the scenes in `folder`; return its numbers, and its texts by id."""
    output = folder / name
    places = (f"source.path={folder}/{source}", f"sink.path={output}", "job.progress=false")
    summary = caption.run(make_plan(load_job(CaptionJob, CONFIG, (*overrides, *places))))
    texts: dict[str, str] = {}
    directory = OutputDir(str(output))
    for part in read_tables(directory, list_tables(directory, (DATA,)), ["sample_id", "generated_text"]):
        texts |= {row["sample_id"]: row["generated_text"] for row in part.to_pylist()}
    return {
        "num_rows": summary.num_made,
        "wall_s": summary.wall_s,
        "engine_s": summary.engine_s,
        "num_tokens": summary.num_tokens_made,
        "acceptance_length": summary.mean_acceptance_length,
        "actors_waited_share": summary.waits.actors_waited,
    }, texts


def pipeline_table(results: Results) -> str:
    """Render medians over the repeats; no speed if a text is missing or differs from plain decoding's."""
    groups: dict[tuple[str, str], list[Results]] = {}
    for row in results["rows"]:
        groups.setdefault((row["method"], row["compile"]), []).append(row)
    lines = []
    for place, rows in groups.items():
        speeds = ["withheld"] * 2
        if all(row["num_equal"] == row["num_rows"] == results["num_scenes"] for row in rows):
            names = ("num_rows", "num_tokens")
            speeds = [figure(spread([row[name] / row["wall_s"] for row in rows]), 1) for name in names]
        engine = percent(statistics.median(row["engine_s"] / row["wall_s"] for row in rows))
        waited = percent(statistics.median(row["actors_waited_share"] for row in rows))
        length = f"{statistics.median(row['acceptance_length'] for row in rows):.2f}"
        equal = f"{sum(row['num_equal'] for row in rows)} of {results['num_scenes'] * len(rows)}"
        lines.append((*place, *speeds, engine, waited, length, equal))
    columns = "method | compiled | rows/s | tokens/s | engine at work | actor without input | acceptance length"
    return table(f"{columns} | texts equal", lines)


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("pipeline", __doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args(arguments)
    description = machine()
    rows: list[Results] = []
    texts: list[dict[str, str]] = []
    jobs = {f"{name}, {compiles}": (name, compiles) for name, compiles in product(METHODS, COMPILE)}
    with tempfile.TemporaryDirectory() as temporary, ray_session.session(Job()):
        folder = Path(temporary)
        faulty = (NOT_AN_IMAGE, TRUNCATED, NO_QUESTION)
        scenes = [row for place, row in enumerate(draw_rows(options.rows, SEED)) if place not in faulty]
        for name, some in (("source", scenes), ("first", scenes[:ROWS_PER_SHARD])):
            (folder / name).mkdir()
            for number, start in enumerate(range(0, len(some), ROWS_PER_SHARD)):
                write_parquet(some[start : start + ROWS_PER_SHARD], folder / name / f"shard-{number:03}")
        run_job(folder, "warm", (*METHODS["plain"], "pool.compile=never"), "first")
        for number, order in enumerate(turns(list(jobs), options.repeats)):
            for label in order:
                name, compiles = jobs[label]
                place = f"{label}, {number}".replace(",", "").replace(" ", "-")
                row, found = run_job(folder, place, (*METHODS[name], f"pool.compile={compiles}"), "source")
                texts.append(found)
                rows.append({**row, "method": name, "compile": compiles})
                progress(f"{place}: {row}")
    expected = texts[[(row["method"], row["compile"]) for row in rows].index(FIRST)]
    for row, found in zip(rows, texts, strict=True):
        row["num_equal"] = len(found.items() & expected.items())
    rows.sort(key=lambda row: list(jobs.values()).index((row["method"], row["compile"])))
    results = {"machine": description, "num_scenes": len(scenes), "rows": rows}
    return finish(RESULTS, results, pipeline_table)


if __name__ == "__main__":
    sys.exit(main())
