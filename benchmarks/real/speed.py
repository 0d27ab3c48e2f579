"""Measures tokens per second of methods on the pretrained pairs, on a CPU or a GPU, beside plain decoding.

    python -m zoo.real; python -m zoo.real_vision              # once: targets, drafters, prompts
    python -m benchmarks.real.speed --pair text
    python -m benchmarks.real.speed --pair vision
    python -m benchmarks.real.speed --pair text --device cuda  # adds transformers' `generate`
    python -m benchmarks.real.speed --pair text --methods sd_tree suffix  # these again, in place of their rows
    python -m benchmarks.real.heads; python -m benchmarks.real.speed --pair text --methods eagle3_25 medusa block_8

Writes results/real_speed.json, where each pair and device has its own part. Needs neither Ray nor vLLM.

Decoding is greedy, in bfloat16, at most 64 new tokens. All methods share one target. An engine decodes other prompts in
each round, so that nothing is copied from an earlier pass over the same prompts, and visual features are not cached.
The methods of a round decode the same prompts one after the other.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from actors.loading.pair import Pair
from benchmarks.harness.engines import acceptance_of
from benchmarks.harness.markdown import Results, figure
from benchmarks.harness.results import command_line, cores, machine, progress, read_results, results_file, write_results
from benchmarks.harness.verdict import spread, turns
from benchmarks.real import text, vision_settings
from benchmarks.real.contenders import Contender, OfEngine, OfTransformers, load_all
from benchmarks.tables.parts import show
from configs.schema import CaptionJobConfig
from decoding import Completion, Request
from zoo.quality import dense_requests
from zoo.world.dense import draw_asked

RESULTS = results_file("real_speed")
BATCHES = {"cpu": (1, 8, 32), "cuda": (1, 32, 128)}
NUM_ROUNDS = 3
MAX_NEW_TOKENS = 64
MIN_PROMPTS, MAX_PROMPTS = 8, 128
"""Limits of the prompts of a round, which are two per slot. As many come before the first round."""
DTYPE = "bfloat16"
PLAIN, GENERATE = "plain", "generate of transformers"
METHODS: dict[tuple[str, str], tuple[str, ...]] = {
    ("text", "cpu"): (PLAIN, "lookup", "suffix", "layer_skip", "sd_chain", "sd_tree", "eagle2_25"),
    ("text", "cuda"): (PLAIN, "suffix", "sd_chain", "sd_tree", "eagle2_25"),
    ("vision", "cpu"): (
        *(PLAIN, "suffix", "layer_skip", "sd_chain/weak", "sd_chain/strong", "tabed_mt/weak", "tabed_mt/strong"),
        *("sd_tree/strong", "specvlm/strong", "specvlm_50/strong", "sage/strong", "lvspec/strong", "typical/strong"),
    ),
    ("vision", "cuda"): (
        *(PLAIN, "suffix", "sd_chain/weak", "sd_chain/strong", "tabed_mt/strong", "sd_tree/strong"),
        *("specvlm_50/strong", "sage/strong", "lvspec/strong"),
    ),
}
"""Pair and device → methods, plain decoding first; those of vision are settings of `vision_settings`. Fewer on a GPU,
where each takes seconds to compile and capture."""
NOT_SHIPPED = {"text": tuple(text.HEADS), "vision": ()}
"""Pair → methods whose heads do not ship. They are measured only if `--methods` names them."""
MAKERS = {"text": "zoo.real", "vision": "zoo.real_vision"}
"""Pair → the module that builds its checkpoints."""
MakeRequests = Callable[[Pair, int, int], list[Request]]
"""Maps pair, number and `max_new_tokens` to greedy requests."""


@dataclass(frozen=True)
class Bed:
    """Methods of one pair, as jobs by name (plain decoding first), and its requests."""

    jobs: Mapping[str, CaptionJobConfig]
    make_requests: MakeRequests


def methods_of(name: str, device: str) -> tuple[str, ...]:
    """Return all methods that can be measured, in the order of the tables."""
    return METHODS[name, device] + NOT_SHIPPED[name]


def bed_of(name: str, device: str) -> Bed:
    """Return the methods and requests of the pair `text` or `vision`."""
    methods = methods_of(name, device)
    if name == "text":
        return Bed({method: text.job_of(method, DTYPE, device) for method in methods}, text.text_requests)
    settings = vision_settings.settings()
    jobs = {method: vision_settings.job_of(settings[method], DTYPE, device) for method in methods}
    return Bed(jobs, scene_requests)


def scene_requests(pair: Pair, num: int, max_new_tokens: int) -> list[Request]:
    """Return greedy requests about held-out scenes."""
    return dense_requests(pair.target, draw_asked("held_out", num, vision_settings.SEED), max_new_tokens)


@dataclass
class Timed:
    """Outputs and speeds of the timed rounds of a contender."""

    outputs: list[tuple[int, ...]]
    completions: list[Completion]
    tokens_per_s: list[float]


def measure_batch(
    contenders: Mapping[str, Contender], rounds: Sequence[Sequence[Request]], has_time: Callable[[], bool]
) -> dict[str, Timed]:
    """Time the rounds; all contenders decode a round's requests. No round but the first starts without time."""
    timed = {name: Timed([], [], []) for name in contenders}
    for number, order in enumerate(turns(list(contenders), len(rounds))):
        if number and not has_time():
            break
        for name in order:
            if number and contenders[name].is_timed_once:
                continue
            start_s = time.perf_counter()
            outputs, completions = contenders[name].decode(rounds[number])
            spent_s = time.perf_counter() - start_s
            timed[name].outputs += outputs
            timed[name].completions += completions or []
            timed[name].tokens_per_s.append(sum(map(len, outputs)) / spent_s)
    return timed


def measure_speed(
    pairs: Mapping[str, Pair],
    make_requests: MakeRequests = text.text_requests,
    batches: Sequence[int] = BATCHES["cpu"],
    has_time: Callable[[], bool] = lambda: True,
    save: Callable[[Results], None] = lambda _: None,
) -> Results:
    """Time the methods of `pairs`, the first of which is plain decoding, at several batch sizes.

    Returns `rows`, one per method and batch size, and what was `left_out` for lack of time; `save` receives both after
    each batch size.
    """
    plain = next(iter(pairs))
    results: Results = {"rows": [], "left_out": []}
    for batch in batches:
        num = min(max(2 * batch, MIN_PROMPTS), MAX_PROMPTS)
        num_needed = (1 + NUM_ROUNDS) * num
        requests = make_requests(pairs[plain], num_needed, MAX_NEW_TOKENS)
        if len(requests) < num_needed:
            raise ValueError(f"batch {batch} needs {num_needed} prompts, and there are {len(requests)}")
        kinds: dict[str, tuple[type[OfEngine | OfTransformers], Pair]] = {
            name: (OfEngine, pair) for name, pair in pairs.items()
        }
        if pairs[plain].target.device.type == "cuda" and not requests[0].images:
            kinds[GENERATE] = OfTransformers, pairs[plain]
        contenders: dict[str, Contender] = {}
        for name, (kind, pair) in kinds.items():
            if not has_time():
                results["left_out"].append(f"{name}, batch {batch}")
                continue
            start_s = time.perf_counter()
            contenders[name] = kind(pair, batch)
            contenders[name].decode(requests[:num])  # compiles layers, captures steps
            progress(f"batch {batch:3d} {name:25s} ready after {time.perf_counter() - start_s:.1f} s")
        if plain not in contenders:
            save(results)
            continue
        rounds = [requests[num * index : num * (index + 1)] for index in range(1, 1 + NUM_ROUNDS)]
        timed = measure_batch(contenders, rounds, has_time)
        results["rows"] += [make_row(name, batch, timed[name], timed[plain]) for name in timed]
        save(results)
        del contenders
        gc.collect()  # engines are in reference cycles
    return results


def merge(earlier: Results, later: Results, methods: Sequence[str]) -> Results:
    """Return the earlier results with the rows of a later run in place of those of its methods.

    Plain decoding keeps its row while rows of its run remain; ratios are of each row's own run.
    """
    new = {(row["method"], row["batch"]): row for row in later["rows"]}
    old = {(row["method"], row["batch"]): row for row in earlier["rows"] if (row["method"], row["batch"]) not in new}
    if not old:
        return later
    rows = new | old | {key: row for row in earlier["rows"] if (key := (row["method"], row["batch"]))[0] == PLAIN}
    order = {name: index for index, name in enumerate((*methods, GENERATE))}
    return earlier | {"rows": sorted(rows.values(), key=lambda row: (row["batch"], order[row["method"]]))}


def make_row(name: str, batch: int, timed: Timed, plain: Timed) -> Results:
    """Return the figures of a method at a batch size; `plain` has at least its rounds."""
    row: Results = {
        "method": name,
        "batch": batch,
        "num_prompts": len(timed.outputs),
        "num_equal": sum(output == other for output, other in zip(timed.outputs, plain.outputs, strict=False)),
        **(acceptance_of(timed.completions) if timed.completions else {}),
        "tokens_per_s": spread(timed.tokens_per_s),
        "over_plain": spread(
            [speed / base for speed, base in zip(timed.tokens_per_s, plain.tokens_per_s, strict=False)]
        ),
    }
    progress(f"batch {batch:3d} {name:25s} {figure(row['over_plain'], 2)} of plain")
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 2 if nothing can be measured."""
    parser = command_line("real.speed", __doc__)
    parser.add_argument("--pair", choices=("text", "vision"), required=True)
    parser.add_argument("--device", choices=tuple(BATCHES), default="cpu")
    parser.add_argument(
        "--methods", nargs="+", help="measure these beside plain decoding, keep the rows of others (all)"
    )
    parser.add_argument("--threads", type=int, default=len(cores()), help="(all cores)")
    parser.add_argument("--max-seconds", type=float, default=None, help="start no measurement later (no limit)")
    options = parser.parse_args(arguments)
    began_s = time.monotonic()
    if options.device == "cuda" and not torch.cuda.is_available():
        progress("refused: no CUDA device was found")
        return 2
    bed = bed_of(options.pair, options.device)
    if unknown := sorted(set(options.methods or ()) - set(bed.jobs)):
        parser.error(f"--methods: {', '.join(unknown)} is not one of {', '.join(bed.jobs)}")
    chosen = (PLAIN, *options.methods) if options.methods else METHODS[options.pair, options.device]
    bed = replace(bed, jobs={name: job for name, job in bed.jobs.items() if name in chosen})
    for name, job in bed.jobs.items():
        for checkpoint in (job.model.target, job.model.drafter):
            if checkpoint is not None and not Path(checkpoint.path).exists():
                maker = "benchmarks.real.heads" if name in NOT_SHIPPED[options.pair] else MAKERS[options.pair]
                progress(
                    f"refused: {checkpoint.path}, which {name} needs, does not exist; run `python -m {maker}` first"
                )
                return 2
    earlier = read_results(RESULTS) if RESULTS.exists() else {}
    if options.methods and options.device not in earlier.get(options.pair, {}):
        progress(f"refused: {RESULTS} has no rows of this pair and device to keep; run without --methods first")
        return 2
    torch.set_num_threads(options.threads)
    device = f"{machine()}, {options.threads} threads"
    if options.device == "cuda":
        device = f"{torch.cuda.get_device_name()}, {len(cores())} cores"
    setting = {"device": device, "torch": torch.__version__}

    def has_time() -> bool:
        return options.max_seconds is None or time.monotonic() - began_s < options.max_seconds

    def save(results: Results) -> None:
        part, results = earlier.get(options.pair, {}), {"setting": setting, **results}
        if options.methods:
            results = merge(part[options.device], results, methods_of(options.pair, options.device))
        write_results(RESULTS, {**earlier, options.pair: {**part, options.device: results}})

    results = measure_speed(load_all(bed.jobs), bed.make_requests, BATCHES[options.device], has_time, save)
    table = f"real_{options.pair}_speed" + ("_gpu" if options.device == "cuda" else "")
    print(show("real_speed", {options.pair: {options.device: {"setting": setting, **results}}}, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
