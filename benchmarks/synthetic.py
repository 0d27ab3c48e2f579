"""Synthetic timings of long visual contexts: acceptance is forced and visual columns are random numbers.

    python -m benchmarks.synthetic          # 2,000 and 25,000 columns, under ten minutes; writes results/synthetic.json
    python -m benchmarks.synthetic --dry    # the same, printed only
    python -m benchmarks.synthetic --quick  # few columns and steps, printed only

What steps cost over the memory of many images or of a long video, and what drafts would bring at given acceptance: the
inflated text pair, whose rows hold so many columns of random numbers beside their prompt, and an acceptance rule that
takes each draft with a given probability, whatever the target says. Texts mean nothing here, so that no output is held
against another. Plain decoding and chains take turns at each batch size; the drafter reads all columns or the text
alone. Only steps count, those with all rows in them; prompts and random columns are made before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.loading.method import plain_method
from actors.loading.pair import load_target
from benchmarks.forced_acceptance import Forced
from benchmarks.peer_rounds import turns
from benchmarks.peer_verdict import spread
from benchmarks.peers import SCRATCH, SEED, cores, cpu_name, inflated
from benchmarks.synthetic_tables import synthetic_setting, synthetic_table
from configs.schema import Checkpoint
from decoding import Engine, Request, Sampling
from decoding.contexts import Full
from decoding.contracts import Method
from decoding.drafters import ModelDrafter
from decoding.trees import Chain
from models.backends.memory import free_bytes
from models.kv.lanes import LaneModel
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.text_samples import held_out_prompts

RESULTS = Path(__file__).parent / "results" / "synthetic.json"
OF_MEMORY = 0.7
"""Share of the free memory that one cell may take; one that would take more is left out and named."""
MAX_S = 300.0
"""No cell is begun after so long; the results name those that were left out."""
ENOUGH_S, MIN_STEPS = 8.0, 4
"""A timing ends after so long, but not before so many steps."""
MAX_PROMPT_TOKENS, SPARE = 160, 16
READS = ("all columns", "the text alone")
"""What drafters read, which is what they are named by."""


@dataclass(frozen=True)
class Size:
    """The grid: visual columns, batches, drafts of a step, rates of acceptance; and steps of each timing."""

    columns: tuple[int, ...]
    batches: tuple[int, ...]
    gammas: tuple[int, ...]
    rates: tuple[float, ...]
    num_steps: int
    num_rounds: int


FULL = Size((2_000, 25_000), (1, 4), (3, 5), (0.5, 0.7, 0.9), 20, 2)
QUICK = Size((300,), (1, 2), (3,), (0.5, 0.9), 4, 2)


@dataclass(frozen=True)
class Contender:
    """Plain decoding (`gamma` 0), or chains of `gamma` with a rate of acceptance and what the drafter reads."""

    gamma: int = 0
    rate: float = 0.0
    drafter_reads: str = ""


class Filled:
    """A model whose rows hold `num_columns` columns of random numbers behind their prompt; otherwise the model itself.

    All engines over it share one memory, so that one of them may be at work at a time.
    """

    def __init__(self, model: Target, num_columns: int, num_slots: int, capacity: int) -> None:
        self._model = model
        self._num_columns = num_columns
        self._lanes = model.lanes(num_slots, 1, capacity + num_columns)
        self._is_filled = False
        self._admit = self._lanes.admit
        setattr(self._lanes, "admit", self.admit)  # noqa: B010  (a method of this one memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def lanes(self, num_slots: int, num_lanes: int, capacity: int) -> LaneModel:
        """The one memory.

        Raises:
            ValueError: it is too small.
        """
        cache = self._lanes.cache
        if num_lanes != 1 or num_slots > cache.num_rows or capacity + self._num_columns > cache.capacity:
            raise ValueError(f"{num_slots} slots of {capacity} columns do not fit into what was made")
        return self._lanes

    def admit(self, slots: Any, prefixes: Any, *options: Any, **named: Any) -> Any:
        """As `LaneModel.admit`, and then the random columns count as read."""
        cache = self._lanes.cache
        if not self._is_filled:
            # Memory is made by its first forward. Afterwards it holds numbers only, so that nothing has to be wiped.
            self._admit(slots, prefixes, *options, **named)
            for memory in (*cache.keys, *cache.values):
                fill(memory)
            setattr(cache, "wipe", lambda *_: None)  # noqa: B010
            self._is_filled = True
        prefill = self._admit(slots, prefixes, *options, **named)
        cache.lens[self._lanes.rows(slots)] += self._num_columns
        for slot in slots.ids:
            self._lanes._prefix_lengths[slot] += self._num_columns
        return prefill


def fill(memory: Tensor) -> None:
    """Random numbers for a layer's memory (rows, H, columns, D), the same for every row and head."""
    noise = torch.randn(memory.shape[2:], generator=torch.Generator().manual_seed(SEED)).to(memory.dtype)
    memory.copy_(noise)


def requests(batch: int, size: Size, seed: int) -> list[Request]:
    """One for each slot, with more tokens to come than all steps can bring."""
    sampling = Sampling(max_new_tokens=room(size) - 1, ignore_eos=True)
    prompts = held_out_prompts(batch, SEED)
    return [Request(f"row-{number}", text, sampling=sampling, seed=seed) for number, text in enumerate(prompts)]


def room(size: Size) -> int:
    """Tokens that steps may bring to a row, the first one and one to spare among them."""
    return (size.num_steps + 1) * (max(size.gammas) + 1) + 3


def build(contender: Contender, target: Any, drafters: dict[str, Any]) -> Method:
    """The parts of a method whose acceptance is forced."""
    if contender.gamma == 0:
        return plain_method()
    drafter = ModelDrafter(drafters[contender.drafter_reads], [Full()], target.vocab_size)
    return Method(drafter, Chain(contender.gamma), Forced(contender.rate))


def time_steps(engine: Engine, asked: list[Request], num_steps: int) -> tuple[float, int, int]:
    """Seconds of at most `num_steps` steps of all rows, after the one that admits them; how many there were, and their
    tokens.

    Raises:
        RuntimeError: a row ended, or was refused.
    """
    for request in asked:
        engine.submit(request)
    ended = engine.step()
    before, done = count_tokens(engine), 0
    start = time.perf_counter()
    spent = 0.0
    while not ended and done < num_steps and (done < MIN_STEPS or spent < ENOUGH_S):
        ended = engine.step()
        done += 1
        spent = time.perf_counter() - start
    if ended:
        raise RuntimeError(f"{ended[0].sample_id} ended while steps were timed: {ended[0].error or 'no room left'}")
    return spent, done, count_tokens(engine) - before


def count_tokens(engine: Engine) -> int:
    """Tokens of all rows in slots."""
    return sum(len(one.token_ids) for one in engine._slots.progress if one is not None)


def memory_bytes(models: Sequence[Target], num_columns: int, batch: int) -> int:
    """Keys and values of a cell, about; the drafter's counted with all columns and without."""
    per_column = 0
    for model in models:
        text: Any = model.decoder.config
        per_column += text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 2 * model.dtype.itemsize
    return per_column * num_columns * max(2, batch)


def contenders(size: Size) -> dict[str, Contender]:
    """All of them by name, plain decoding first."""
    drafting = [Contender(*one) for one in product(size.gammas, size.rates, READS)]
    return {f"{one.gamma} {one.rate:g} {one.drafter_reads}": one for one in (Contender(), *drafting)}


def measure_cell(target: Target, drafter: Target, size: Size, num_columns: int, batch: int) -> list[dict[str, Any]]:
    """A row for each contender over so many columns at one batch size."""
    # Rows as long as the cell before are gone only after their cycles are.
    gc.collect()
    context = MAX_PROMPT_TOKENS + room(size)
    filled = Filled(target, num_columns, batch, context + SPARE)
    drafters = {
        "all columns": Filled(drafter, num_columns, batch, context + SPARE),
        "the text alone": Filled(drafter, 0, batch, context + SPARE),
    }
    named = contenders(size)
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in named}

    def run(one: Contender, seed: int, num_steps: int) -> tuple[float, int, int]:
        engine = Engine(filled, build(one, filled, drafters), batch, context)  # type: ignore[arg-type]
        return time_steps(engine, requests(batch, size, seed), num_steps)

    for one in named.values():
        if one.rate in (0.0, size.rates[0]):
            run(one, SEED, 2)  # what is compiled or made once
    for number, order in enumerate(turns(list(named), size.num_rounds)):
        for name in order:
            found[name].append(run(named[name], SEED + number, size.num_steps))
    rows = []
    for name, one in named.items():
        seconds, steps, tokens = (list(values) for values in zip(*found[name], strict=True))
        speeds = [count / spent for count, spent in zip(tokens, seconds, strict=True)]
        rows.append(
            {"synthetic": True, "num_columns": num_columns, "batch": batch, **asdict(one)}
            | {"seconds": seconds, "num_steps": steps, "synthetic_tokens": tokens}
            | {"synthetic_tokens_per_s": spread(speeds)}
        )
        where = f"synthetic, {num_columns} columns, batch {batch}, {name}"
        print(f"{where}: {spread(speeds)['median']:.1f} tokens/s", file=sys.stderr, flush=True)
    return rows


def measure(size: Size, target: Target, drafter: Target) -> tuple[list[dict[str, Any]], list[tuple[int, int, str]]]:
    """The rows of the whole grid, and (columns, batch, what was lacking) of what was left out."""
    rows: list[dict[str, Any]] = []
    left_out = []
    began_s = time.monotonic()
    for num_columns, batch in product(size.columns, size.batches):
        if time.monotonic() - began_s > MAX_S:
            left_out.append((num_columns, batch, "time"))
        elif memory_bytes((target, drafter), num_columns, batch) > OF_MEMORY * free_bytes():
            left_out.append((num_columns, batch, "memory"))
        else:
            rows += measure_cell(target, drafter, size, num_columns, batch)
    return rows, left_out


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synthetic", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few columns and steps; nothing is written")
    parser.add_argument("--dry", action="store_true", help="the whole grid, but nothing is written")
    parser.add_argument("--columns", type=int, nargs="+", metavar="N", help="some of the grid, printed only")
    parser.add_argument("--batches", type=int, nargs="+", metavar="N", help="some of the grid, printed only")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(cores()), help="(all cores)")
    parser.add_argument("--target-shape", default="0.3B", help="'as-is' for no inflation (0.3B)")
    parser.add_argument("--drafter-shape", default="draft-0.05", help="the same for the drafter (draft-0.05)")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    options = parser.parse_args(arguments)
    for name in ("target_shape", "drafter_shape"):
        if getattr(options, name) == "as-is":
            setattr(options, name, None)
    if min([*(options.columns or []), *(options.batches or []), 1]) < 1:
        parser.error("columns and batches are at least 1")
    options.dry |= options.columns is not None or options.batches is not None
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure; see the module's docstring."""
    options = parse(arguments)
    size = QUICK if options.quick else FULL
    size = replace(size, columns=tuple(options.columns or size.columns), batches=tuple(options.batches or size.batches))
    load = os.getloadavg()[0]
    torch.set_num_threads(options.threads)
    models = []
    for name, shape in (("text_target", options.target_shape), ("text_drafter", options.drafter_shape)):
        folder = str(inflated(CHECKPOINTS / name, shape, options.dtype, options.scratch))
        models.append(load_target(Checkpoint(path=folder, dtype=options.dtype, device="cpu"), folder))
        models[-1].compile()
    rows, left_out = measure(size, *models)
    found = {
        "synthetic": "acceptance is forced and visual columns are random numbers; outputs mean nothing, and equality "
        "with plain decoding is not claimed",
        "target_shape": options.target_shape,
        "drafter_shape": options.drafter_shape,
        "dtype": options.dtype,
        "threads": options.threads,
        "seeds": [SEED + number for number in range(size.num_rounds)],
        "machine": f"{cpu_name()}, {len(cores())} cores, load {load:.1f} at the start",
        "torch": torch.__version__,
        "left_out": left_out,
        "synthetic_rows": rows,
    }
    print(synthetic_setting(found), synthetic_table(found), sep="\n\n")
    if not options.quick and not options.dry:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
