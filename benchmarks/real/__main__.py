"""Measures lossless methods on a pretrained model and real text: equality, acceptance, speed.

    python -m zoo.real                 # once: the model and the prompts
    python -m benchmarks.learning      # if methods with a trained head are wanted; an hour
    python -m benchmarks.real          # equality and acceptance that results/real.json lacks
    python -m benchmarks.real --speed  # tokens per second, added to the same file

Prompts are held-out documentation texts, which no drafter is trained on. Equality and acceptance are measured in
float32: greedy outputs are compared with transformers' `generate` of the target alone, sampled outputs with plain
sampling under the same noise. Speed is measured in bfloat16; the methods of a round run one after the other, and every
speed is relative to plain decoding in the same round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.harness.markdown import Results
from benchmarks.harness.results import (
    command_line,
    cores,
    machine,
    progress,
    read_results,
    results_file,
    write_results,
)
from benchmarks.real.text import (
    HEAD,
    HELD_OUT,
    MAX_NEW_TOKENS,
    NUM_PROMPTS,
    SLOTS,
    SPEED_METHODS,
    equality_table,
    measure_equality,
    measure_speed,
    prepare,
    settings,
    speed_table,
)

RESULTS = results_file("real")


def run_missing(results: Results, num_prompts: int, scratch: Path) -> None:
    """Measure the settings that `results` lacks with this number of prompts, writing the file after each."""
    wanted = settings(HEAD.exists())
    kept = [row for row in results.get("equality", []) if row["num_prompts"] == num_prompts]
    found = {(row["method"], row["temperature"]): row for row in kept}
    for row in measure_equality([one for one in wanted if one not in found], num_prompts, scratch):
        found[row["method"], row["temperature"]] = row
        results["equality"] = [found[one] for one in wanted if one in found]
        write_results(RESULTS, results)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("real", __doc__)
    parser.add_argument("--speed", action="store_true", help="measure speed; the file must have the other rows")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help=f"({NUM_PROMPTS})")
    parser.add_argument("--threads", type=int, default=len(cores()), help="(all cores)")
    parser.add_argument("--scratch", type=Path, default=Path(".bench/real"))
    options: argparse.Namespace = parser.parse_args(arguments)
    if not HELD_OUT.exists():
        progress(f"refused: {HELD_OUT} does not exist; run `python -m zoo.real` first")
        return 2
    torch.set_num_threads(options.threads)
    about = {"machine": machine(), "threads": options.threads, "torch": torch.__version__}
    about |= {"transformers": version("transformers"), "python": sys.version.split()[0]}
    results: Results = read_results(RESULTS) if RESULTS.exists() else {}
    if options.speed:
        results |= {
            "speed_setting": about,
            "speed": measure_speed({name: prepare(name, "bfloat16") for name in SPEED_METHODS}),
        }
    else:
        results |= {"setting": about, "max_new_tokens": MAX_NEW_TOKENS, "slots": SLOTS}
        run_missing(results, options.prompts, options.scratch)
    write_results(RESULTS, results)
    print(speed_table(results) if options.speed else equality_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
