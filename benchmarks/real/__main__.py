"""Measures lossless methods on a pretrained model and real text: equality, acceptance, speed.

    python -m zoo.real                 # once: the model, its drafters and the prompts
    python -m benchmarks.real          # equality and acceptance; writes results/real.json, resumes from .bench/real
    python -m benchmarks.real --heads  # the same of heads that `python -m benchmarks.real.heads` trained
    python -m benchmarks.real --peers  # tokens per second beside transformers and vLLM

Prompts are held-out documentation texts, which no drafter is trained on. Equality and acceptance are measured in
float32: greedy outputs are compared with transformers' `generate` of the target alone, sampled outputs with plain
sampling under the same noise. Speed is measured in bfloat16, all engines in turn.
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
from benchmarks.real.heads import trainings
from benchmarks.real.peers import compare_engines
from benchmarks.real.text import (
    DRAFTER,
    EAGLE,
    HEADS,
    HEADS_FOLDER,
    HELD_OUT,
    MAX_NEW_TOKENS,
    NUM_PROMPTS,
    SLOTS,
    drafter_sha256,
    head_settings,
    measure_equality,
    settings,
)
from benchmarks.tables.parts import finish

RESULTS = results_file("real")


def run_equality(wanted: Sequence[tuple[str, float]], num_prompts: int, scratch: Path) -> list[Results]:
    """Measure settings, and keep each in the scratch folder, from where an interrupted run goes on.

    Results of other checkpoints are measured again.
    """
    partial = scratch / f"equality-{num_prompts}.json"
    rows = read_results(partial)["equality"] if partial.exists() else []
    hashes = {name: drafter_sha256(name) for name, _ in wanted}

    def is_current(row: Results) -> bool:
        name = row["method"]
        return name not in hashes or row.get("drafter_sha256") == hashes[name]

    measured = {(row["method"], row["temperature"]): row for row in rows if is_current(row)}
    scratch.mkdir(parents=True, exist_ok=True)
    for row in measure_equality([setting for setting in wanted if setting not in measured], num_prompts, scratch):
        measured[row["method"], row["temperature"]] = row
        write_results(partial, {"equality": list(measured.values())})
    return [measured[setting] for setting in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("real", __doc__)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--heads", action="store_true", help="measure equality and acceptance of trained heads")
    parts.add_argument("--peers", action="store_true", help="measure speed beside transformers and vLLM")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help=f"({NUM_PROMPTS})")
    parser.add_argument("--threads", type=int, default=len(cores()), help="(all cores)")
    parser.add_argument("--scratch", type=Path, default=Path(".bench/real"))
    options: argparse.Namespace = parser.parse_args(arguments)
    for path in (HELD_OUT, DRAFTER, EAGLE):
        if not path.exists():
            progress(f"refused: {path} does not exist; run `python -m zoo.real` first")
            return 2
    missing = [name for name in HEADS if options.heads and not (HEADS_FOLDER / name / "training.json").exists()]
    if missing:
        progress(f"refused: {HEADS_FOLDER} has no {missing[0]}; run `python -m benchmarks.real.heads` first")
        return 2
    torch.set_num_threads(options.threads)
    about = {"machine": machine(), "threads": options.threads, "torch": torch.__version__}
    about |= {"transformers": version("transformers"), "python": sys.version.split()[0]}
    results: Results = read_results(RESULTS) if RESULTS.exists() else {}
    if options.peers:
        measured = compare_engines(options)
        if measured is None:
            return 1
        results["peers"] = measured
    elif options.heads:
        results |= {"heads_setting": about, "trained_heads": trainings()}
        results["heads"] = run_equality(head_settings(), options.prompts, options.scratch)
    else:
        results |= {"setting": about, "max_new_tokens": MAX_NEW_TOKENS, "slots": SLOTS}
        results["equality"] = run_equality(settings(), options.prompts, options.scratch)
    part = "real_peers" if options.peers else "real_heads" if options.heads else "real_equality"
    return finish(RESULTS, results, part)


if __name__ == "__main__":
    sys.exit(main())
