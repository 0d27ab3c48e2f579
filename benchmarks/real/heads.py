"""Trains heads for the pretrained text model on the answers of a finished job, as its shipped drafter was trained.

    python -m zoo.real                # once: the model and the prompts
    python -m jobs.caption --config configs/jobs/real_text.yaml --limit 600 method=plain sampling.max_new_tokens=64 \\
        sink.path=out/real/answers
    python -m jobs.vocabulary --target out/real/target --out out/real/vocabulary.json out/real/answers
    python -m benchmarks.real.heads   # keeps heads that exist

`python -m benchmarks.real --heads` measures them. The EAGLE-2 head of the same training ships
(`zoo/real/eagle.safetensors`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.markdown import Results
from benchmarks.harness.results import cores, progress
from benchmarks.real.text import HEADS, HEADS_FOLDER
from jobs import train_drafter
from jobs.terminal.exit_status import DONE
from zoo.real.drafters import EAGLE as EAGLE_FILE
from zoo.real.drafters import read_notes

TRAINING = "configs/jobs/train_real_drafter.yaml"


def arguments_of(name: str, folder: Path, threads: int) -> list[str]:
    """Return the arguments of `jobs.train_drafter` for a head."""
    overrides = {
        "head": HEADS[name],
        "output.path": folder / name,
        "workers.torch_threads": threads,
        "workers.teacher_cache.path": folder / "states",
    }
    return ["--config", TRAINING, *(f"{key}={value}" for key, value in overrides.items())]


def trainings() -> list[Results]:
    """Return what the training jobs of the shipped head and of all others measured."""
    measured = {"eagle2_25": read_notes(EAGLE_FILE)["measured"]}
    for name in HEADS:
        measured[name] = json.loads((HEADS_FOLDER / name / "training.json").read_text())["measured"]
    names = ("num_taught_rows", "num_epochs", "top1_accuracy", "top3_accuracy")
    return [{"method": name, **{key: figures[key] for key in names}} for name, figures in measured.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(cores()), help="(all cores)")
    options = parser.parse_args(arguments)
    for name in HEADS:
        if (HEADS_FOLDER / name / "training.json").exists():
            continue
        if train_drafter.main(arguments_of(name, HEADS_FOLDER, options.threads)) != DONE:
            progress(f"{name}: the training failed")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
