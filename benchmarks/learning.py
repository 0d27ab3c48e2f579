"""Measures how much faster a drafter that learned a finished job's answers makes the next job, by number of rows.

    python -m zoo.real                                                            # once: the model and the prompts
    python -m jobs.caption --config configs/jobs/real_text.yaml method=plain      # the finished job
    python -m jobs.vocabulary --target out/real/target --out out/real/vocabulary.json out/real/text
    python -m benchmarks.learning            # trains the heads, which takes about an hour; writes results/learning.json
    python -m benchmarks.learning --speed    # adds their speed on held-out prompts

The heads of `configs/jobs/train_real_eagle3.yaml` learn from a quarter and from all answers, about two epochs each.
The target's states are computed once and are shared by all trainings. Held-out prompts are decoded greedily in
bfloat16, by all methods in turns; speeds are relative to plain decoding in the same round.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import torch

from actors.loading.pair import Pair, load
from benchmarks.harness.markdown import Results, percent, table
from benchmarks.harness.results import (
    command_line,
    cores,
    machine,
    progress,
    read_results,
    results_file,
    write_results,
)
from benchmarks.real.speed import measure_speed
from benchmarks.real.speed_tables import speed_table
from benchmarks.real.text import CONFIG, HELD_OUT
from configs.load import load_job
from configs.schema import CaptionJob
from jobs import train_drafter
from jobs.exit_status import DONE

RESULTS = results_file("learning")
TRAINING = "configs/jobs/train_real_eagle3.yaml"
SHARES = (1.0, 0.25)
"""Shares of the answers, all of them first: the other then reads the target's states from disk."""
NUM_EPOCHS, BATCH_ROWS = 2, 8
CHAIN = 4


def heads(folder: Path, num_answers: int) -> dict[str, tuple[int, Path]]:
    """Return label → (answers, folder of the head)."""
    return {
        f"eagle3, {round(share * num_answers):,} rows": (round(share * num_answers), folder / f"{share:g}")
        for share in SHARES
    }


def train(source: str, folder: Path, threads: int) -> list[Results]:
    """Train the heads that are missing; return one row per head."""
    num_answers = sum(pq.read_metadata(path).num_rows for path in Path(source, "data").glob("*.parquet"))
    rows = []
    for label, (num_rows, head) in heads(folder, num_answers).items():
        if not (head / "training.json").exists():
            arguments = [
                *("--config", TRAINING, f"source.path={source}", f"output.path={head}"),
                *(f"training.max_rows={num_rows}", f"training.num_steps={NUM_EPOCHS * num_rows // BATCH_ROWS}"),
                *(f"training.batch_rows={BATCH_ROWS}", f"workers.torch_threads={threads}"),
                f"workers.teacher_cache.path={folder / 'states'}",
            ]
            if train_drafter.main(arguments) != DONE:
                raise RuntimeError(f"{label}: the training failed")
        measured = json.loads((head / "training.json").read_text())["measured"]
        names = ("num_taught_rows", "num_epochs", "seconds", "top1_accuracy", "top3_accuracy", "mean_acceptance_length")
        rows.append({"method": label, "num_rows": num_rows, **{name: measured[name] for name in names}})
        progress(rows[-1])
    return rows


def prepare(method: str, head: Path | None) -> Pair:
    """Load the target, and a head or a drafter without weights."""
    drafter = () if head is None else (f"model.drafter={{path: {head}, dtype: bfloat16, device: cpu}}",)
    return load(load_job(CaptionJob, CONFIG, (f"method={method}", *drafter, "model.target.device=cpu")))


def pairs_of(folder: Path, trained: Sequence[Results]) -> dict[str, Pair]:
    """Load the pairs whose speeds are compared: plain decoding, suffix decoding and the heads."""
    chain = f"{{drafter: {{kind: eagle3}}, tree: {{kind: chain, length: {CHAIN}}}}}"
    pairs = {"plain": prepare("plain", None), "suffix": prepare("suffix", None)}
    folders = [head for _, head in heads(folder, trained[0]["num_rows"]).values()]
    return pairs | {row["method"]: prepare(chain, head) for row, head in zip(trained, folders, strict=True)}


def training_table(results: Results) -> str:
    """Render what each head learned, and how long it took."""
    lines = [
        [
            f"{row['num_taught_rows']:,}",
            row["num_epochs"],
            f"{row['seconds'] / 60:.0f} min",
            percent(row["top1_accuracy"]),
            percent(row["top3_accuracy"]),
            f"{row['mean_acceptance_length']:.2f}",
        ]
        for row in sorted(results["training"], key=lambda one: one["num_rows"])
    ]
    return table(
        "rows learned | epochs begun | training | top-1 | top-3 | acceptance length, tree of the training job", lines
    )


def learning_table(results: Results) -> str:
    """Render the speed of the heads."""
    return speed_table({"rows": results["speed"], "left_out": []})


TABLES = {"learning_training": training_table, "learning": learning_table}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("learning", __doc__)
    parser.add_argument("--speed", action="store_true", help="measure speed; the heads must exist")
    parser.add_argument("--source", default="out/real/text", help="output of the finished job (out/real/text)")
    parser.add_argument(
        "--heads", type=Path, default=Path("out/real/heads"), help="folder of the heads (out/real/heads)"
    )
    parser.add_argument("--threads", type=int, default=len(cores()), help="(all cores)")
    options = parser.parse_args(arguments)
    if not HELD_OUT.exists():
        progress(f"refused: {HELD_OUT} does not exist; run `python -m zoo.real` first")
        return 2
    about = {"machine": machine(), "threads": options.threads, "torch": torch.__version__}
    results: Results = read_results(RESULTS) if RESULTS.exists() else {}
    if options.speed:
        torch.set_num_threads(options.threads)
        results |= {
            "speed_setting": about,
            "speed": measure_speed(pairs_of(options.heads, results["training"]))["rows"],
        }
    else:
        results |= {"training_setting": about, "training": train(options.source, options.heads, options.threads)}
    write_results(RESULTS, results)
    print(learning_table(results) if options.speed else training_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
