"""Does `method.auto` keep the method that is best when all are measured? On a grid of workloads, with real models.

    python -m benchmarks.auto           # the grid on inflated pairs; writes results/auto.json; some 40 minutes
    python -m benchmarks.auto --quick   # two workloads on small pairs, printed only: does it run?
    python -m benchmarks.auto --table   # the table of the committed JSON

A workload is a batch, a length, a drafter of a given cost and a drafter of a given quality. Cost follows from inflation
(`benchmarks.inflate`); a worse drafter is the trained one with noise on its head. Every method decodes the same rows
alone, interleaved, several times before and several times after an engine with `method.auto` gets rows until it has
chosen: that says which is best, with an interval that holds what changed about the machine meanwhile. Tokens in which a
method, or the trial, differs from the others end the run without results.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils.logging import disable_progress_bar

from actors.auto.comparison import Comparison
from actors.auto.trial import Trial, make_engine
from actors.choice import WITHIN
from actors.loading.method import plain_method
from actors.loading.pair import Pair, load
from benchmarks.auto_alone import MAX_CONTEXT_TOKENS, Alone, Tokens, check_equal, requests
from benchmarks.auto_tables import (
    ANOTHER,
    BEST,
    GAPS,
    WITHIN_INTERVAL,
    WITHIN_TRIAL,
    auto_claims_table,
    auto_table,
    row_of,
)
from benchmarks.inflate_files import inflate_folder
from benchmarks.inflate_shapes import Shape, drafter_shape
from configs.load import validate
from configs.schema import CaptionJob
from decoding import Engine
from models.target import Target

RESULTS = Path(__file__).parent / "results" / "auto.json"
CHECKPOINTS = Path("zoo/checkpoints")
CHAINS = (2, 5)
NOISE = {"trained": 0.0, "poor": 3.0}
"""Deviation of what is added to the drafter's head, in deviations of its own weights."""
CHECKED = {"num_prompts": 1, "max_new_tokens": 8}
"""What each inflated folder is held to its source on; `benchmarks.inflate_check` holds more."""
MAX_TRIAL_ROWS = 4000
MAX_S = 3300.0
"""No workload is begun after so long; the results say how many there should have been."""


@dataclass(frozen=True)
class Size:
    """How large the models are, how many rows are measured how often, and which workloads."""

    shape: Shape
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    ratios: tuple[float, ...]
    drafters: tuple[str, ...]
    rows_per_slot: int
    num_repeats: int
    """Before a trial, and again after it."""
    max_rounds: int


FULL = Size(Shape(1024, 6, 16, 16, 2816), (2, 8), (6, 16), (0.05, 0.2), ("trained", "poor"), 6, 2, 6)
QUICK = Size(Shape(256, 3, 4, 4, 512), (4,), (6,), (0.2,), ("trained", "poor"), 2, 2, 2)


def write_pairs(size: Size, folder: Path) -> dict[tuple[float, str], tuple[str, str]]:
    """Inflated checkpoints, checked against their sources: (ratio, drafter) → folders of target and drafter."""
    small = size is QUICK
    target = CHECKPOINTS / "text_target" if small else folder / "target"
    if not small:
        inflate_folder(CHECKPOINTS / "text_target", target, size.shape, "float32", **CHECKED)
    pairs = {}
    for name in size.drafters:
        source = folder / f"source_{name}"
        shutil.copytree(CHECKPOINTS / "text_drafter", source)
        _disturb(source / "model.safetensors", NOISE[name])
        for ratio in size.ratios:
            drafter = source if small else folder / f"{name}_{ratio}"
            if not small:
                inflate_folder(source, drafter, drafter_shape(size.shape, ratio), "float32", **CHECKED)
            pairs[ratio, name] = (str(target), str(drafter))
    return pairs


def _disturb(file: Path, deviations: float) -> None:
    """Add noise to the head of a checkpoint."""
    tensors = load_file(file)
    head = tensors["lm_head.weight"].float()
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = (head + deviations * head.std() * noise).to(tensors["lm_head.weight"].dtype)
    save_file(tensors, file, {"format": "pt"})


def job_of(target: str, drafter: str, slots: int, max_rounds: int) -> CaptionJob:
    """A job with plain decoding and chains as candidates; its source and sink are never opened."""
    chains = [
        {"name": f"chain-{length}", "drafter": {"kind": "model"}, "tree": {"kind": "chain", "length": length}}
        for length in CHAINS
    ]
    data = {
        "source": {"kind": "text", "path": "unused"},
        "prompt": "{text}",
        "model": {
            "target": {"path": target, "dtype": "float32", "device": "cpu"},
            "drafter": {"path": drafter, "dtype": "float32", "device": "cpu"},
        },
        "method": {"auto": {"candidates": chains, "max_rounds": max_rounds}},
        "pool": {"slots": slots, "max_context_tokens": MAX_CONTEXT_TOKENS, "compile": "never"},
        "sink": {"path": "unused"},
    }
    return validate(CaptionJob, data, "benchmarks.auto")


def hold_trial(pair: Pair, slots: int, length: int, tokens: Tokens) -> Trial:
    """Give rows to an engine with `method.auto` until it has chosen.

    Raises:
        RuntimeError: it came to no choice, or gave other tokens than the methods alone.
    """
    trial = make_engine(pair.config.method, slots, pair.engine, pair.plain_engine)
    assert isinstance(trial, Trial)
    waiting = requests(MAX_TRIAL_ROWS, length)
    waiting.reverse()
    while not trial.choices:
        while waiting and trial.num_waiting < slots:
            trial.submit(waiting.pop())
        if not waiting:
            raise RuntimeError(f"no choice after {MAX_TRIAL_ROWS} rows")
        found = {one.sample_id: one.token_ids for one in trial.step()}
        check_equal(tokens, {row: ids for row, ids in found.items() if row in tokens}, "method.auto")
    return trial


def forward_s(model: Target, batch: int) -> float:
    """Seconds of a step of one token per row, the median over a run of plain decoding."""
    engine = Engine(model, plain_method(), batch, MAX_CONTEXT_TOKENS)
    for request in requests(batch, 24):
        engine.submit(request)
    seconds = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def verdict(alone: Comparison, chosen: str, note_of_best: str) -> str:
    """How a trial's choice stands beside what all methods took alone: the best of them, one that this measurement
    cannot tell from the best, one that only the trial could not, or another."""
    if chosen == alone.best:
        return BEST
    if not alone.is_slower(chosen):
        return WITHIN_INTERVAL
    return WITHIN_TRIAL if note_of_best == WITHIN else ANOTHER


def run_workload(pair: Pair, size: Size, slots: int, length: int) -> dict[str, Any]:
    """Measure all methods before and after a trial, and compare."""
    each = Alone(pair, slots, length, size.rows_per_slot)
    each.measure(size.num_repeats)
    choice = hold_trial(pair, slots, length, each.tokens).choices[0]
    each.measure(size.num_repeats)
    alone = each.comparison
    slowdowns = {name: alone.slowdown(name) for name in alone.names}
    notes = {one.method: one.note for one in choice.standings}
    assert isinstance(pair.drafter, Target)
    return {
        "batch": slots,
        "length": length,
        "measured_ratio": forward_s(pair.drafter, slots) / forward_s(pair.target, slots),
        "acceptance_lengths": each.lengths,
        "alone": [asdict(alone.standing(name)) for name in alone.names],
        "best": alone.best,
        "gap": sorted(slowdowns.values())[1] - 1,
        "chosen": choice.method,
        "chosen_slowdown": slowdowns[choice.method],
        "verdict": verdict(alone, choice.method, notes[alone.best]),
        "trial": asdict(choice),
    }


def run(size: Size) -> dict[str, Any]:
    """The whole grid, and what it shows."""
    disable_progress_bar()
    found, began_s = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for (ratio, name), folders in write_pairs(size, Path(folder)).items():
            pair = load(job_of(*folders, 1, size.max_rounds))
            for slots, length in product(size.batches, size.lengths):
                if time.monotonic() - began_s > MAX_S:
                    continue
                cell = {"ratio": ratio, "drafter": name, **run_workload(pair, size, slots, length)}
                print(row_of(cell), file=sys.stderr, flush=True)
                found.append(cell)
    return told(found, size)


def told(found: list[dict[str, Any]], size: Size) -> dict[str, Any]:
    """The results as they are written: the workloads, and what they add up to."""
    return {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "size": asdict(size),
        "num_planned": len(size.batches) * len(size.lengths) * len(size.ratios) * len(size.drafters),
        "num_workloads": len(found),
        "num_best": sum(cell["verdict"] == BEST for cell in found),
        "num_within": sum(cell["verdict"] == WITHIN_INTERVAL for cell in found),
        "num_within_trial": sum(cell["verdict"] == WITHIN_TRIAL for cell in found),
        "num_won_by_plain": sum(cell["best"] == "plain" for cell in found),
        "num_gaps_of_5_to_15_percent": sum(GAPS[0] <= cell["gap"] <= GAPS[1] for cell in found),
        "workloads": found,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two small workloads, printed only")
    parser.add_argument("--table", action="store_true", help="the table of the committed results")
    options = parser.parse_args(arguments)
    if options.table:
        print(auto_table(json.loads(RESULTS.read_text(encoding="utf-8"))))
        return 0
    results = run(QUICK if options.quick else FULL)
    print(auto_table(results), auto_claims_table(results), sep="\n\n")
    if not options.quick:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
