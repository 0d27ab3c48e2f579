"""Times decoding over long visual contexts with random KV entries and a forced acceptance rate.

    python -m benchmarks.synthetic    # 2,000 and 25,000 positions, ten minutes; writes results/synthetic.json

The time of decoding steps over the KV cache of many images or a long video, and the speed-up of drafts at a given
acceptance rate. Outputs are meaningless and are not compared. The drafter reads all positions or only the text. Only
steps with all rows in them count.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from actors.loading.method import plain_method
from benchmarks.harness.engines import kv_bytes, measure_grid
from benchmarks.harness.long_context import SEED, Filled, Forced, time_steps
from benchmarks.harness.markdown import Results, figure, inflated, left_out, table
from benchmarks.harness.results import describe_pair, finish, pair_command_line, progress, results_file
from benchmarks.harness.verdict import relative_speeds, spread, turns
from benchmarks.peers.engine_peer import load_model
from benchmarks.peers.work import inflated_pair
from decoding import Engine, Request, Sampling
from decoding.contexts import Full
from decoding.contracts import Method
from decoding.drafters import ModelDrafter
from decoding.trees import Chain
from models.target import Target
from zoo.text.samples import held_out_prompts

RESULTS = results_file("synthetic")
MAX_S, ENOUGH_S = 300.0, 8.0
"""No configuration starts after `MAX_S`; a timing ends after `ENOUGH_S`."""
MAX_PROMPT_TOKENS, SPARE = 160, 16
READS = ("all columns", "the text alone")


@dataclass(frozen=True)
class Size:
    """The grid (visual positions, batch sizes, drafts per step, acceptance rates), and steps and rounds per timing."""

    columns: tuple[int, ...]
    batches: tuple[int, ...]
    gammas: tuple[int, ...]
    rates: tuple[float, ...]
    num_steps: int
    num_rounds: int

    @property
    def room(self) -> int:
        """Maximum number of tokens that warm-up and timed steps add to a row, plus the prefill's token and two spare
        ones."""
        return (self.num_steps + 1) * (max(self.gammas) + 1) + 3


FULL = Size((2_000, 25_000), (1, 4), (3, 5), (0.5, 0.7, 0.9), 20, 2)


@dataclass(frozen=True)
class Contender:
    """Plain decoding (`gamma` 0), or chains of `gamma` drafts at an acceptance rate."""

    gamma: int = 0
    rate: float = 0.0
    drafter_reads: str = ""

    def method(self, target: Any, drafters: dict[str, Any]) -> Method:
        if self.gamma == 0:
            return plain_method()
        drafter = ModelDrafter(drafters[self.drafter_reads], [Full()], target.vocab_size)
        return Method(drafter, Chain(self.gamma), Forced(self.rate))


def requests(batch: int, size: Size, seed: int) -> list[Request]:
    """Return one request per slot, with more tokens than the timed steps can produce."""
    sampling = Sampling(max_new_tokens=size.room - 1, ignore_eos=True)
    prompts = held_out_prompts(batch, SEED)
    return [Request(f"row-{number}", text, sampling=sampling, seed=seed) for number, text in enumerate(prompts)]


def measure_cell(target: Target, drafter: Target, size: Size, num_columns: int, batch: int) -> list[Results]:
    """Time every contender at one number of visual positions and one batch size; return one row each."""
    context = MAX_PROMPT_TOKENS + size.room
    filled = Filled(target, num_columns, batch, context + SPARE)
    drafters = {reads: Filled(drafter, n, batch, context + SPARE) for reads, n in zip(READS, (num_columns, 0))}
    drafting = [Contender(*one) for one in product(size.gammas, size.rates, READS)]
    named = {f"{one.gamma} {one.rate:g} {one.drafter_reads}": one for one in (Contender(), *drafting)}
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in named}

    def run(one: Contender, seed: int, num_steps: int) -> tuple[float, int, int]:
        engine = Engine(filled, one.method(filled, drafters), batch, context)  # type: ignore[arg-type]
        return time_steps(engine, requests(batch, size, seed), num_steps, enough_s=ENOUGH_S)

    for one in named.values():
        if one.rate in (0.0, size.rates[0]):
            run(one, SEED, 2)  # compiles and allocates
    for number, order in enumerate(turns(list(named), size.num_rounds)):
        for name in order:
            found[name].append(run(named[name], SEED + number, size.num_steps))
    rows = []
    for name, one in named.items():
        seconds, steps, tokens = (list(values) for values in zip(*found[name], strict=True))
        speeds = spread([count / spent for count, spent in zip(tokens, seconds, strict=True)])
        rows.append(
            {"synthetic": True, "num_columns": num_columns, "batch": batch, **asdict(one)}
            | {"seconds": seconds, "num_steps": steps, "synthetic_tokens": tokens, "synthetic_tokens_per_s": speeds}
        )
        progress(f"synthetic, {num_columns} columns, batch {batch}, {name}: {speeds['median']:.1f} tokens/s")
    return rows


def measure(size: Size, target: Target, drafter: Target) -> tuple[list[Results], list[tuple[int, int, str]]]:
    """Return the rows of the grid, and (positions, batch, missing resource) of configurations that were left out."""
    rows, left_out = measure_grid(
        product(size.columns, size.batches),
        lambda cell: sum(kv_bytes(model, cell[0] * max(2, cell[1])) for model in (target, drafter)),
        lambda cell: measure_cell(target, drafter, size, *cell),
        MAX_S,
    )
    return rows, [(*cell, missing) for cell, missing in left_out]


def expected_tokens(rate: float, gamma: int) -> float:
    """Return tokens per step if each of γ drafts is accepted at this rate: 1 + α + … + α^γ (Leviathan et al. 2023)."""
    return sum(rate**place for place in range(gamma + 1))


def tokens_per_step(row: Results) -> float:
    return float(sum(row["synthetic_tokens"]) / (row["batch"] * sum(row["num_steps"])))


def synthetic_table(results: Results) -> str:
    plain = {(row["num_columns"], row["batch"]): row for row in results["synthetic_rows"] if row["gamma"] == 0}
    rows = []
    for row in results["synthetic_rows"]:
        step_ms = spread([1000 * spent / num for spent, num in zip(row["seconds"], row["num_steps"], strict=True)])
        how = ["plain", "", "", "1"]
        if row["gamma"]:
            drawn = f"{expected_tokens(row['rate'], row['gamma']):.2f}, {tokens_per_step(row):.2f}"
            how = [row["gamma"], row["drafter_reads"], f"{row['rate']:g}", drawn]
        over = relative_speeds(row, plain[row["num_columns"], row["batch"]], "synthetic_tokens")
        speeds = figure(row["synthetic_tokens_per_s"], 1)
        rows.append((f"{row['num_columns']:,}", row["batch"], *how, f"{figure(step_ms, 1)} ms", speeds, f"{over:.2f}"))
    return table(
        "visual columns (synthetic) | batch | γ | drafter reads | forced α | tokens per step: expected, drawn "
        "| a step, synthetic | tokens/s, synthetic | over plain, synthetic",
        rows,
    )


def synthetic_setting(results: Results) -> str:
    """Describe the models, the grid and the machine in one paragraph."""
    missing = left_out((lack, f"{columns:,} columns at batch {batch}") for columns, batch, lack in results["left_out"])
    return (
        f"Synthetic: {results['synthetic']}. {inflated(results)}; seeds of the draws "
        f"{', '.join(map(str, results['seeds']))}. Medians of {len(results['seeds'])} rounds, the contenders in "
        f"turn, with the lowest and the highest. {results['machine']}. torch {results['torch']}.{missing}"
    )


TABLES = {"synthetic": synthetic_table, "synthetic_setting": synthetic_setting}


def main(arguments: list[str] | None = None) -> int:
    options = pair_command_line("synthetic", __doc__).parse_args(arguments)
    found = describe_pair(options) | {
        "synthetic": "acceptance is forced and visual columns are random numbers; outputs mean nothing, and equality "
        "with plain decoding is not claimed",
        "seeds": [SEED + number for number in range(FULL.num_rounds)],
    }
    torch.set_num_threads(options.threads)
    models = []
    for folder in map(str, inflated_pair(options)):
        models.append(load_model(folder, options.dtype))
        models[-1].compile()
    found["synthetic_rows"], found["left_out"] = measure(FULL, *models)
    return finish(RESULTS, found, synthetic_setting, synthetic_table)


if __name__ == "__main__":
    sys.exit(main())
