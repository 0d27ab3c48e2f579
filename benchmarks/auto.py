"""Checks whether `method.auto` chooses the fastest method, on a grid of workloads with real models.

    python -m benchmarks.auto    # the grid on inflated pairs; writes results/auto.json; about 40 minutes

A workload is a batch size, a length, a drafter cost (by inflation) and a drafter quality (noise on the drafter's head).
The methods decode the same rows in turns, before and after an engine with `method.auto` makes its choice, so that
changes of the machine's speed widen the interval. Differing tokens end the run without results.
"""

from __future__ import annotations

import math
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils.logging import disable_progress_bar

from actors.auto.comparison import Block, Comparison
from actors.auto.trial import WITHIN, Trial, make_engine
from actors.loading.pair import Pair, load
from benchmarks.harness.engines import plain_step_s
from benchmarks.harness.markdown import Results, goals_table, percent, table
from benchmarks.harness.results import command_line, finish, progress, results_file
from benchmarks.inflate.folders import inflate_folder
from benchmarks.inflate.shapes import Shape, drafter_shape
from configs.load import validate
from configs.schema import CaptionJob
from decoding import Request, Sampling
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.text.samples import held_out_prompts

RESULTS = results_file("auto")
CHAINS = (2, 5)
NOISE = {"trained": 0.0, "poor": 3.0}
"""Noise on the drafter's head, in standard deviations of its weights."""
CHECKED = {"num_prompts": 1, "max_new_tokens": 8}
"""Prompts and tokens on which an inflated checkpoint is compared with its source."""
MAX_CONTEXT_TOKENS, MIN_ROWS, MAX_TRIAL_ROWS = 256, 16, 4000
MAX_S = 3300.0
"""No workload starts after this time."""
BEST, WITHIN_INTERVAL, WITHIN_TRIAL = "the best", "within the interval", "within the trial's interval"
GAPS = (0.05, 0.15)
"""Smallest and largest lead of the best method over the second that counts as close."""
MIN_WON_BY_PLAIN, MIN_NEAR = 3, 3
MAX_SLOWER = 0.05
Tokens = dict[str, tuple[int, ...]]

SHAPE = Shape(1024, 6, 16, 16, 2816)
SIZE: dict[str, Any] = {
    "shape": asdict(SHAPE),
    "batches": (2, 8),
    "lengths": (6, 16),
    "ratios": (0.05, 0.2),
    "drafters": ("trained", "poor"),
    "rows_per_slot": 6,
    "num_repeats": 2,
    "max_rounds": 6,
}
"""Shape of the target, the grid of workloads, rows per slot, and repeats before and again after a trial."""
NUM_PLANNED = math.prod(len(SIZE[name]) for name in ("batches", "lengths", "ratios", "drafters"))


def write_pairs(folder: Path) -> dict[tuple[float, str], tuple[str, str]]:
    """Write the inflated checkpoints; return (cost ratio, drafter) → folders of target and drafter."""
    target = folder / "target"
    inflate_folder(CHECKPOINTS / "text_target", target, SHAPE, "float32", **CHECKED)
    pairs = {}
    for name in SIZE["drafters"]:
        source = folder / f"source_{name}"
        shutil.copytree(CHECKPOINTS / "text_drafter", source)
        tensors = load_file(source / "model.safetensors")
        head = tensors["lm_head.weight"].float()
        noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
        tensors["lm_head.weight"] = (head + NOISE[name] * head.std() * noise).to(tensors["lm_head.weight"].dtype)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        for ratio in SIZE["ratios"]:
            drafter = folder / f"{name}_{ratio}"
            inflate_folder(source, drafter, drafter_shape(SHAPE, ratio), "float32", **CHECKED)
            pairs[ratio, name] = (str(target), str(drafter))
    return pairs


def job_of(target: str, drafter: str) -> CaptionJob:
    """Return a job with plain decoding and chains as candidates; its source and sink are never opened."""
    chains = [
        {"name": f"chain-{length}", "drafter": {"kind": "model"}, "tree": {"kind": "chain", "length": length}}
        for length in CHAINS
    ]
    models = {"target": target, "drafter": drafter}
    data = {
        "source": {"kind": "text", "path": "unused"},
        "prompt": "{text}",
        "model": {name: {"path": path, "dtype": "float32", "device": "cpu"} for name, path in models.items()},
        "method": {"auto": {"candidates": chains, "max_rounds": SIZE["max_rounds"]}},
        "pool": {"slots": 1, "max_context_tokens": MAX_CONTEXT_TOKENS, "compile": "never"},
        "sink": {"path": "unused"},
    }
    return validate(CaptionJob, data, "benchmarks.auto")


def requests(num_rows: int, length: int) -> list[Request]:
    """Return held-out questions whose answers have exactly `length` tokens."""
    sampling = Sampling(max_new_tokens=length, ignore_eos=True)
    prompts = held_out_prompts(200, 0)
    return [Request(f"row-{row}", prompts[row % 200], sampling=sampling) for row in range(num_rows)]


def check_equal(known: Tokens, found: Tokens, name: str) -> None:
    """Add `found` to `known`; raise RuntimeError if a row is empty or its tokens differ from the known ones."""
    for row, tokens in found.items():
        if not tokens or known.setdefault(row, tokens) != tokens:
            raise RuntimeError(f"{row}: {name} gives other tokens than the method before it, or none")


class Alone:
    """Engines that each decode the same rows with one method, in turns; the first turn warms up."""

    def __init__(self, pair: Pair, slots: int, length: int) -> None:
        methods = {one.label: one for one in pair.config.method.methods}
        self._engines = {name: pair.engine(slots, one) for name, one in methods.items()}
        self._rows = requests(max(MIN_ROWS, SIZE["rows_per_slot"] * slots), length)
        self._blocks: list[Block] = []
        self._num_turns = 0
        self.lengths: dict[str, float] = {}
        self.tokens: Tokens = {}
        self.measure(1)
        self._blocks.clear()

    @property
    def comparison(self) -> Comparison:
        """Return the comparison of all methods by engine seconds per row, from all turns so far except the warm-up."""
        return Comparison(self._blocks, 0.0)

    def measure(self, num_repeats: int) -> None:
        """Let every method decode all rows `num_repeats` times."""
        for _ in range(num_repeats):
            self._num_turns += 1
            for name in self._engines if self._num_turns % 2 else reversed(self._engines):
                start = time.perf_counter()
                done = list(self._engines[name].run(self._rows))
                seconds = time.perf_counter() - start
                check_equal(self.tokens, {one.sample_id: one.token_ids for one in done}, name)
                self._blocks.append(Block(name, self._num_turns, seconds / len(done), 0.0, 1.0, len(done)))
                steps = sum(one.telemetry.num_spec_steps for one in done)
                self.lengths[name] = 1 + sum(one.telemetry.num_accepted_draft_tokens for one in done) / max(1, steps)


def hold_trial(pair: Pair, slots: int, length: int, tokens: Tokens) -> Trial:
    """Submit rows to an engine with `method.auto` until it chooses a method.

    Raises RuntimeError if no method is chosen, or tokens differ from those of the methods alone.
    """
    trial = make_engine(pair.config.method, slots, pair.engine, pair.plain_engine)
    assert isinstance(trial, Trial)
    waiting = requests(MAX_TRIAL_ROWS, length)[::-1]
    while not trial.choices:
        while waiting and trial.num_waiting < slots:
            trial.submit(waiting.pop())
        if not waiting:
            raise RuntimeError(f"no choice after {MAX_TRIAL_ROWS} rows")
        found = {one.sample_id: one.token_ids for one in trial.step()}
        check_equal(tokens, {row: ids for row, ids in found.items() if row in tokens}, "method.auto")
    return trial


def verdict(alone: Comparison, chosen: str, note_of_best: str) -> str:
    """Classify a trial's choice by the comparison of the methods alone."""
    if chosen == alone.best:
        return BEST
    if not alone.is_slower(chosen):
        return WITHIN_INTERVAL
    return WITHIN_TRIAL if note_of_best == WITHIN else "another"


def run_workload(pair: Pair, slots: int, length: int) -> Results:
    """Measure all methods before and after a trial of `method.auto`, and compare its choice with the best method."""
    each = Alone(pair, slots, length)
    each.measure(SIZE["num_repeats"])
    choice = hold_trial(pair, slots, length, each.tokens).choices[0]
    each.measure(SIZE["num_repeats"])
    alone = each.comparison
    slowdowns = {name: alone.slowdown(name) for name in alone.names}
    notes = {one.method: one.note for one in choice.standings}
    assert isinstance(pair.drafter, Target)
    target_s, drafter_s = (
        plain_step_s(model, slots, MAX_CONTEXT_TOKENS, requests(slots, 24)) for model in (pair.target, pair.drafter)
    )
    return {
        "batch": slots,
        "length": length,
        "measured_ratio": drafter_s / target_s,
        "acceptance_lengths": each.lengths,
        "alone": [asdict(alone.standing(name)) for name in alone.names],
        "best": alone.best,
        "gap": sorted(slowdowns.values())[1] - 1,
        "chosen": choice.method,
        "chosen_slowdown": slowdowns[choice.method],
        "verdict": verdict(alone, choice.method, notes[alone.best]),
        "trial": asdict(choice),
    }


def run() -> Results:
    """Run every workload of the grid until `MAX_S` have passed."""
    disable_progress_bar()
    found: list[Results] = []
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for (ratio, name), folders in write_pairs(Path(folder)).items():
            pair = load(job_of(*folders))
            for slots, length in product(SIZE["batches"], SIZE["lengths"]):
                if time.monotonic() - start_s <= MAX_S:
                    found.append({"ratio": ratio, "drafter": name, **run_workload(pair, slots, length)})
                    progress(" | ".join(map(str, row_of(found[-1]))))
    return results_of(found)


def results_of(found: list[Results]) -> Results:
    """Return the workloads with the machine, the grid and the number of workloads per verdict."""
    verdicts = Counter(cell["verdict"] for cell in found)
    return {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "size": SIZE,
        "num_planned": NUM_PLANNED,
        "num_workloads": len(found),
        "num_best": verdicts[BEST],
        "num_within": verdicts[WITHIN_INTERVAL],
        "num_within_trial": verdicts[WITHIN_TRIAL],
        "num_won_by_plain": sum(cell["best"] == "plain" for cell in found),
        "num_gaps_of_5_to_15_percent": sum(GAPS[0] <= cell["gap"] <= GAPS[1] for cell in found),
        "workloads": found,
    }


def row_of(cell: Results) -> tuple[Any, ...]:
    return (
        *(cell[name] for name in ("batch", "length", "drafter", "ratio")),
        f"{cell['measured_ratio']:.2f}",
        f"{max(cell['acceptance_lengths'].values()):.2f}",
        cell["best"],
        percent(cell["gap"]),
        cell["chosen"],
        cell["verdict"],
        percent(cell["chosen_slowdown"] - 1),
        f"{cell['trial']['num_rows']} rows, {cell['trial']['num_rounds']} rounds",
    )


def auto_table(results: Results) -> str:
    columns = "batch | tokens | drafter | c asked | c measured | acceptance length | best alone | ahead by"
    columns += " | `auto` keeps | which is | slower by | trial"
    return table(columns, map(row_of, results["workloads"]))


def claims(results: Results) -> list[tuple[str, bool, str]]:
    """Check the goals; return (text, whether it is reached, numbers) of each."""
    measured, planned = results["num_workloads"], results["num_planned"]
    best, within, trial = (results[name] for name in ("num_best", "num_within", "num_within_trial"))
    worst = max((cell["chosen_slowdown"] - 1 for cell in results["workloads"]), default=0.0)
    kept = f"the best in {best}, within the interval in {within}, only within the trial's in {trial}, another in "
    kept += str(measured - best - within - trial)
    near, plain = results["num_gaps_of_5_to_15_percent"], results["num_won_by_plain"]
    all_good, none_slow = measured > 0 and best + within == measured, measured > 0 and worst <= MAX_SLOWER
    slow = f"`auto` keeps none that is more than {percent(MAX_SLOWER)} slower than the best"
    return [
        ("the whole grid was measured", measured == planned, f"{measured} of {planned} workloads"),
        ("`auto` keeps the method that is best alone, or one within the interval", all_good, kept),
        (slow, none_slow, f"at most {percent(worst, 1)} slower"),
        (f"plain decoding is best in at least {MIN_WON_BY_PLAIN}", plain >= MIN_WON_BY_PLAIN, str(plain)),
        (f"the best is 5 to 15 % ahead in at least {MIN_NEAR}", near >= MIN_NEAR, str(near)),
    ]


def auto_claims_table(results: Results) -> str:
    return goals_table(claims(results))


TABLES = {"auto": auto_table, "auto_claims": auto_claims_table}


def main(arguments: list[str] | None = None) -> int:
    command_line("auto", __doc__).parse_args(arguments)
    return finish(RESULTS, run(), auto_table, auto_claims_table)


if __name__ == "__main__":
    sys.exit(main())
