"""Measures how often `jobs.verify` finds a planted fault, and whether clean outputs raise an alarm.

    python -m benchmarks.guarantees.verification     # writes results/verification.json; minutes
    python -m benchmarks.tables           # the tables

The shipped text pair captions the rows of a text file. The output is decoded again once; every seed of the
choice then reads and compares the chosen rows of the faulty output with that decoding.
"""

from __future__ import annotations

import io
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from actors.losses import loss_of
from benchmarks.harness.results import command_line, progress, results_file
from benchmarks.tables.parts import finish
from configs.load import load_preset, validate
from configs.pool import JobSectionConfig
from configs.schema import CaptionJobConfig
from jobs.caption import results, run
from pipeline.cluster.ray_session import session
from pipeline.run.plan import make_plan
from pipeline.verify.bounds import detection_probability
from pipeline.verify.compare import DIFFERENT, RowComparison
from pipeline.verify.rows import SampleShare, count_chosen, rounds
from pipeline.verify.run import decode_again, prepare, verify
from pipeline.verify.second import Settings
from zoo.pair import CHECKPOINTS
from zoo.text import held_out_questions
from zoo.world import listing

RESULTS = results_file("verification")
SHARES = (0.01, 0.05, 0.2, 0.5)
CLEAN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sd_chain_text", {}),
    ("sd_chain_text", {"temperature": 1.0}),
    ("sd_chain_text", {"repetition_penalty": 1.2}),
    ("sd_tree", {}),
    ("sd_tree", {"temperature": 0.8, "top_p": 0.9}),
    ("lookup", {}),
    ("lookup", {"temperature": 1.0, "top_k": 20}),
    ("suffix", {}),
    ("jacobi", {}),
    ("jacobi", {"temperature": 0.7}),
)
"""Methods and sampling values of the clean outputs."""


def config_of(folder: Path, name: str, method: str, **sampling: Any) -> CaptionJobConfig:
    """Return the job that decodes `folder`/source into `folder`/`name`."""
    method_of = load_preset(CaptionJobConfig, f"zoo_{method}").method
    return validate(
        CaptionJobConfig,
        {
            "source": {"kind": "text", "path": f"{folder}/source"},
            "prompt": "{text}",
            "model": {
                "target": {"path": f"{CHECKPOINTS}/text_target", "dtype": "float32"},
                "drafter": {"path": f"{CHECKPOINTS}/text_drafter", "dtype": "float32"},
            },
            "method": method_of.model_dump(mode="json"),
            "sampling": {"max_new_tokens": 40, **sampling},
            "pool": {"slots": 32, "max_context_tokens": 256},
            "sink": {"path": f"{folder}/{name}", "keep_tokens": True},
            "job": {"progress": False},
        },
        name,
    )


def write_source(folder: Path, num_rows: int, seed: int) -> None:
    """Write prompts of held-out scenes, one per line."""
    (folder / "source").mkdir()
    prompts = (listing.write_prompt(*asked) for asked in held_out_questions(num_rows, seed))
    (folder / "source/prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))


def plant(output: Path, seed: int) -> str:
    """Change one token of one row of an output, and return the id of the row."""
    rng = random.Random(seed)
    path = rng.choice(sorted((output / "data").glob("*.parquet")))
    rows = pq.read_table(path)
    tokens, row = rows["token_ids"].to_pylist(), rng.randrange(rows.num_rows)
    position = rng.randrange(len(tokens[row]))
    tokens[row][position] += 1
    index = rows.schema.get_field_index("token_ids")
    changed = rows.set_column(index, rows.schema.field(index), pa.array(tokens, rows.schema.field(index).type))
    sink = io.BytesIO()
    pq.write_table(changed.replace_schema_metadata(rows.schema.metadata), sink)
    path.write_bytes(sink.getvalue())
    return str(rows["sample_id"][row].as_py())


def detection(folder: Path, num_seeds: int) -> dict[str, Any]:
    """Plant a fault in the output `folder`/faulty, and count the seeds of the choice that find it, by share."""
    run(make_plan(config_of(folder, "faulty", "sd_chain_text")))
    wrong = plant(folder / "faulty", 0)
    verification = prepare(Settings(f"{folder}/faulty", 1.0))
    [recorded] = rounds(verification.job, verification.choice, verification.num_chosen)
    again = pa.concat_tables(decode_again(verification, recorded, results))
    cells = []
    for share in SHARES:
        num_found = num_false = num_chosen = 0
        for seed in range(num_seeds):
            choice = SampleShare(share, seed)
            total = count_chosen(verification.job, choice)[1]
            num_chosen += total
            if not total:
                continue
            [chosen] = rounds(verification.job, choice, total)
            compared = RowComparison(chosen, loss_of("exact", "metric"))
            compared.add(again)
            differing = {row["sample_id"] for row in compared.differences}
            num_found += wrong in differing
            num_false += len(differing - {wrong})
        cells.append(
            {
                "share": share,
                "num_found": num_found,
                "num_false": num_false,
                "mean_chosen": num_chosen / num_seeds,
                "stated": detection_probability(share, 1),
            }
        )
        progress(f"share {share:g}: found by {num_found} of {num_seeds} seeds")
    result = verify(verification, results)
    return {
        "num_rows": verification.num_rows,
        "cells": cells,
        "whole": {name: result.counts[name] for name in ("equal", DIFFERENT)},
    }


def clean_outputs(folder: Path) -> list[dict[str, Any]]:
    """Verify all rows of one clean output per method; return rows and differing rows of each."""
    cells = []
    for number, (method, sampling) in enumerate(CLEAN):
        run(make_plan(config_of(folder, f"clean{number}", method, **sampling)))
        result = verify(prepare(Settings(f"{folder}/clean{number}", 1.0)), results)
        cell = {"method": method, "sampling": sampling, "num_rows": result.num_samples, **result.to_json()["loss"]}
        cells.append(cell | {"num_different": result.num_different, "num_tie": result.counts["tie"]})
        progress(f"{method} {sampling}: {result.num_different} of {result.num_samples} rows differ")
    return cells


def run_all(num_rows: int, num_clean_rows: int, num_seeds: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, session(JobSectionConfig(num_cpus=2), log_to_driver=False):
        folder, other = Path(name) / "fault", Path(name) / "clean"
        for path, count in ((folder, num_rows), (other, num_clean_rows)):
            path.mkdir()
            write_source(path, count, seed)
        detected = detection(folder, num_seeds)
        clean = clean_outputs(other)
    return {"num_seeds": num_seeds, "seed": seed, "torch": torch.__version__, "detection": detected, "clean": clean}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("verification", __doc__)
    parser.add_argument("--rows", type=int, default=1000, help="rows of the faulty output (1000)")
    parser.add_argument("--clean-rows", type=int, default=50, help="rows of each clean output (50)")
    parser.add_argument("--seeds", type=int, default=1000, help="seeds of the choice for each share (1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    options = parser.parse_args(arguments)
    figures = run_all(options.rows, options.clean_rows, options.seeds, options.seed)
    return finish(RESULTS, figures)


if __name__ == "__main__":
    sys.exit(main())
