"""Measures rows that compete for the drafts of a step, beside the depth controller and plain decoding.

    python -m benchmarks.row_budgets    # writes results/row_budgets.json; about half an hour on two CPU cores
    python -m benchmarks.row_budgets --batches 128 --rounds 3    # some batch sizes; rows of the others are kept

The text pair is inflated. Engines stay as they are over all rounds, so that controllers learn only once, in the untimed
round; the methods of a round run one after the other over the same prompts, and every speed is relative to plain
decoding in the same round.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from actors.loading.pair import Pair, load
from benchmarks.harness.engines import acceptance_of, run_requests
from benchmarks.harness.markdown import Results, figure, table
from benchmarks.harness.results import command_line, cores, finish, machine, progress, read_results, results_file
from benchmarks.harness.verdict import spread, turns
from benchmarks.inflate.folders import inflate_folder
from benchmarks.inflate.shapes import drafter_shape, named_shape
from configs.load import validate
from configs.schema import CaptionJob
from decoding import Completion, Engine, Request, Sampling
from zoo.pair import CHECKPOINTS
from zoo.text.samples import held_out_prompts

RESULTS = results_file("row_budgets")
SHAPE, RATIO, LENGTH = "0.3B", 0.05, 8
BATCHES, NUM_ROUNDS = (8, 32, 128), 5
ROWS_PER_SLOT, MAX_NEW_TOKENS, MAX_CONTEXT_TOKENS = 2, 64, 256
CONTROLLERS: dict[str, dict[str, object] | None] = {
    "plain": None,
    "one depth for all rows": {"kind": "measured"},
    "rows compete": {"kind": "measured", "per_row": True},
}


def write_pair(scratch: Path, dtype: str) -> dict[str, str]:
    """Return the folders of the inflated pair, made in the scratch folder unless they exist."""
    shape = named_shape(SHAPE)
    folders = {}
    for name, own in (("target", shape), ("drafter", drafter_shape(shape, RATIO))):
        folder = scratch / f"{name}-{SHAPE}-{dtype}"
        if not folder.exists():
            inflate_folder(CHECKPOINTS / f"text_{name}", folder, own, dtype)
        folders[name] = str(folder)
    return folders


def load_pair(folders: dict[str, str], controller: dict[str, object] | None, slots: int, dtype: str) -> Pair:
    """Load the pair with plain decoding (no controller), or with chains under a controller."""
    chain = {"drafter": {"kind": "model"}, "tree": {"kind": "chain", "length": LENGTH}, "controller": controller}
    models = {name: {"path": path, "dtype": dtype, "device": "cpu"} for name, path in folders.items()}
    if controller is None:
        del models["drafter"]
    data = {
        "source": {"kind": "text", "path": "unused"},
        "prompt": "{text}",
        "model": models,
        "method": {} if controller is None else chain,
        "pool": {"slots": slots, "max_context_tokens": MAX_CONTEXT_TOKENS},
        "sink": {"path": "unused"},
    }
    return load(validate(CaptionJob, data, "benchmarks.row_budgets"))


def timed(engine: Engine, requests: Sequence[Request]) -> tuple[list[Completion], float]:
    start_s = time.perf_counter()
    done = run_requests(engine, requests)
    return done, time.perf_counter() - start_s


def measure(folders: dict[str, str], batch: int, num_rounds: int, dtype: str) -> list[Results]:
    """Decode the same prompts with every controller in turns; return a row per controller."""
    prompts = held_out_prompts(ROWS_PER_SLOT * batch, 0)
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
    requests = [Request(str(number), prompt, sampling=sampling) for number, prompt in enumerate(prompts)]
    pairs = {name: load_pair(folders, one, batch, dtype) for name, one in CONTROLLERS.items()}
    engines = {name: pair.engine(batch) for name, pair in pairs.items()}
    for engine in engines.values():  # compiles layers; controllers measure depths
        timed(engine, requests)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    last: dict[str, list[Completion]] = {}
    for order in turns(list(engines), num_rounds):
        for name in order:
            last[name], spent_s = timed(engines[name], requests)
            speeds[name].append(sum(len(one.token_ids) for one in last[name]) / spent_s)
    rows: list[Results] = []
    for name, done in last.items():
        ratios = [own / base for own, base in zip(speeds[name], speeds["plain"], strict=True)]
        steps = sum(one.telemetry.num_spec_steps for one in done)
        rows.append(
            {
                "controller": name,
                "batch": batch,
                "num_prompts": len(requests),
                "num_equal": sum(a.token_ids == b.token_ids for a, b in zip(done, last["plain"], strict=True)),
                **acceptance_of(done),
                "drafts_per_row_step": sum(one.telemetry.num_draft_tokens for one in done) / steps,
                "tokens_per_s": spread(speeds[name]),
                "over_plain": spread(ratios),
                "over_one_depth": spread(
                    [own / base for own, base in zip(speeds[name], speeds["one depth for all rows"], strict=True)]
                ),
            }
        )
        progress(f"batch {batch:3d} {name:24s} {figure(rows[-1]['over_plain'], 2)}")
    return rows


def budgets_table(results: Results) -> str:
    """Render speed and drafts of every controller by batch size."""
    lines = [
        [
            row["batch"],
            row["controller"],
            row["rounds"],
            f"{row['mean_acceptance_length']:.2f} ± {row['acceptance_length_se']:.2f}",
            f"{row['drafts_per_row_step']:.2f}",
            figure(row["tokens_per_s"], 0),
            figure(row["over_plain"], 2),
            figure(row["over_one_depth"], 2),
            f"{row['num_equal']} of {row['num_prompts']}",
        ]
        for row in results["rows"]
    ]
    titles = "batch | drafts | rounds | acceptance length | verified drafts per row and step | tokens/s | over plain"
    return table(f"{titles} | over one depth | rows equal to plain", lines)


TABLES = {"row_budgets": budgets_table}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("row_budgets", __doc__)
    parser.add_argument("--scratch", type=Path, default=Path(".bench/row_budgets"))
    parser.add_argument("--threads", type=int, default=len(cores()), help="(all cores)")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help=f"({NUM_ROUNDS})")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help=f"{BATCHES}")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.scratch.mkdir(parents=True, exist_ok=True)
    folders = write_pair(options.scratch, options.dtype)
    setting = {"torch": torch.__version__, "shape": SHAPE, "ratio": RATIO, "dtype": options.dtype}
    run = {"machine": machine(), "threads": options.threads, "rounds": options.rounds}
    known: Results = read_results(RESULTS) if RESULTS.exists() else {"setting": setting, "rows": []}
    if known["setting"] != setting:
        parser.error(f"{RESULTS} has other settings: {known['setting']}")
    rows = [row for row in known["rows"] if row["batch"] not in options.batches]
    for batch in options.batches:
        rows += [run | row for row in measure(folders, batch, options.rounds, options.dtype)]
    results = {"setting": setting, "rows": sorted(rows, key=lambda row: row["batch"])}
    return finish(RESULTS, results, budgets_table)


if __name__ == "__main__":
    sys.exit(main())
