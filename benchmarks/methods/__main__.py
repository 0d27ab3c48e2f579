"""Measures every method on every scenario of the zoo, with the same seeds: acceptance, cost, quality, equality.

    python -m benchmarks.methods                  # all presets of the zoo; writes results/methods.json
    python -m benchmarks.methods --missing        # presets that the committed JSON lacks, with the same cases and seed
    python -m benchmarks.methods --only tabed_mt  # some of them, printed only

Lossless methods are compared with plain decoding token by token; lossy ones are reported with their quality, and with
the output of the drafter alone, with all visual tokens and pruned. Presets `zoo_video_*` run on the video pair. Every
ratio has its standard error over cases.
"""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from actors.loading.method import build_method
from actors.loading.pair import Pair, load
from benchmarks.harness.claims import ratio_error
from benchmarks.harness.engines import acceptance_of, run_requests, sum_histograms
from benchmarks.harness.results import command_line, progress, read_results, results_file, write_results
from benchmarks.methods.claims import check_claims
from benchmarks.methods.pruned_drafters import FollowDrafter, count_seen_cells
from benchmarks.methods.scenarios import Case, attribute_overlap, build_scenarios, build_video_scenarios
from benchmarks.methods.tables import acceptance_table, video_table
from configs.load import load_preset
from configs.method import Method as MethodChoice
from configs.presets import PRESETS
from configs.schema import CaptionJob
from decoding import Completion, Engine, Request, Sampling
from decoding.contracts import Method

RESULTS = results_file("methods")
MAX_NEW_TOKENS = 160
SLOTS = 32
MAX_CONTEXT_TOKENS = 768
ALONE = {"drafter_alone": ("plain", "sd_chain"), "video_drafter_alone": ("video_plain", "video_sd")}
"""Name → (preset to run with the drafter as its target, preset that the drafter is taken from)."""
PRUNED_ALONE = {"pruned_drafter_alone": "lvspec", "video_pruned_drafter_alone": "video_lvspec"}
"""Name of LVSpec's pruned drafter alone → its preset."""
PRUNINGS = ("specvlm", "specvlm_uniform")
Completions = dict[str, dict[str, Completion]]


def presets(video: bool = False) -> dict[str, CaptionJob]:
    """Return the zoo's presets on images or on videos by name, plain decoding first."""
    found = {
        name.removeprefix("zoo_"): load_preset(CaptionJob, name)
        for name in sorted(PRESETS)
        if re.match("zoo_(?!images_)", name) and name.startswith("zoo_video_") == video
    }
    first = "video_plain" if video else "plain"
    return {first: found.pop(first), **found}


def run_cases(pair: Pair, engine: Engine, cases: list[Case], sampling: Sampling, seed: int) -> dict[str, Completion]:
    """Return all completions of one scenario by case id; raise RuntimeError if one failed."""
    requests = [Request(c.case_id, pair.render(c.messages), c.images, sampling, seed, videos=c.videos) for c in cases]
    return {completion.sample_id: completion for completion in run_requests(engine, requests)}


def measure(
    cases: list[Case], done: dict[str, Completion], plain: dict[str, Completion] | None, target_forwards: int
) -> dict[str, Any]:
    """Return the metrics of one method on one scenario; `…_se` are standard errors over cases."""
    completions = [done[case.case_id] for case in cases]
    telemetry = [one.telemetry for one in completions]
    tokens = sum(len(one.token_ids) for one in completions)
    cell: dict[str, Any] = {
        "num_cases": len(cases),
        "num_tokens": tokens,
        **acceptance_of(completions),
        "target_forwards_per_token": sum(one.target_forwards for one in telemetry) / tokens,
        "drafter_forwards_per_step": sum(one.drafter_forwards for one in telemetry)
        / max(1, sum(one.num_spec_steps for one in telemetry)),
        "acceptance_histogram": sum_histograms(completions),
        "batch_forwards": target_forwards,
    }
    scores = [case.score(done[case.case_id].text) for case in cases if case.score is not None]
    if scores:
        right, stated = zip(*scores, strict=True)
        cell["accuracy"] = sum(right) / max(1, sum(stated))
        cell["accuracy_se"] = ratio_error(right, stated)
    words = [attribute_overlap(done[case.case_id].text, case.truth) for case in cases if case.truth]
    if words:
        above, below = [2 * shared for shared, _, _ in words], [output + true for _, output, true in words]
        cell["attribute_f1"] = sum(above) / max(1, sum(below))
        cell["attribute_f1_se"] = ratio_error(above, below)
    if plain is not None:
        same = sum(done[case.case_id].token_ids == plain[case.case_id].token_ids for case in cases)
        cell["equal_share"] = same / len(cases)
    return cell


def run_method(
    pair: Pair,
    choice: MethodChoice,
    scenarios: dict[str, list[Case]],
    sampling: Sampling,
    plain: Completions | None,
    seed: int,
    follow_drafter: bool = False,
) -> tuple[dict[str, Any], Completions]:
    """Run one method over all scenarios; return metrics and completions. `follow_drafter` accepts every draft."""
    cells: dict[str, Any] = {}
    completions: Completions = {}
    for name, cases in scenarios.items():
        method = build_method(choice, pair.drafter, pair.target)
        if follow_drafter:
            method = Method(method.drafter, method.tree, FollowDrafter())
        engine = Engine(pair.target, method, SLOTS, MAX_CONTEXT_TOKENS)
        completions[name] = run_cases(pair, engine, cases, sampling, seed)
        target_forwards = engine.stats.target_forwards
        cells[name] = measure(cases, completions[name], plain[name] if plain else None, target_forwards)
    return cells, completions


def run_all(
    jobs: dict[str, CaptionJob], names: list[str], scenarios: dict[str, list[Case]], seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every name (a preset of `jobs`, or a key of `ALONE` or `PRUNED_ALONE`) with its result; the reference is
    plain decoding at the same temperature."""
    first = next(iter(jobs))
    plain: dict[float, Completions] = {}
    for name in names:
        start = time.perf_counter()
        job = jobs[ALONE[name][0] if name in ALONE else PRUNED_ALONE.get(name, name)]
        if name in ALONE:
            drafter = jobs[ALONE[name][1]].model.drafter
            job = job.model_copy(update={"model": job.model.model_copy(update={"target": drafter})})
        sampling = Sampling(**{**job.sampling.model_dump(), "max_new_tokens": MAX_NEW_TOKENS})
        if sampling.temperature not in plain:
            base = load(jobs[first])
            _, plain[sampling.temperature] = run_method(base, jobs[first].method, scenarios, sampling, None, seed)
        followed = name in PRUNED_ALONE
        cells, _ = run_method(load(job), job.method, scenarios, sampling, plain[sampling.temperature], seed, followed)
        lengths = "  ".join(f"{key} {cell['mean_acceptance_length']:.2f}" for key, cell in cells.items())
        progress(f"{name:18s} {time.perf_counter() - start:6.1f} s  {lengths}")
        yield (
            name,
            {
                "verify_mode": "other model" if name in ALONE or followed else job.method.verify_mode,
                "temperature": sampling.temperature,
                "acceptance": "follow" if followed else job.method.acceptance.kind,
                "scenarios": cells,
            },
        )


def names_of(jobs: dict[str, CaptionJob]) -> list[str]:
    """Return the presets and the names of their drafters alone."""
    alone = [name for name, (preset, _) in ALONE.items() if preset in jobs]
    return [*jobs, *alone, *(name for name, preset in PRUNED_ALONE.items() if preset in jobs)]


def run_into(results: dict[str, Any], only: list[str] | None, write: Callable[[dict[str, Any]], None]) -> None:
    """Run the methods missing from `results` (restricted to `only`, if given), calling `write` after each."""
    num_cases, seed = results["num_cases"], results["seed"]
    for jobs, build, place in (
        (presets(), build_scenarios, results["methods"]),
        (presets(video=True), build_video_scenarios, results["video"]["methods"]),
    ):
        names = names_of(jobs)
        missing = [name for name in names if name not in place and (only is None or name in only)]
        scenarios = build(num_cases, seed) if missing else {}
        for name, found in run_all(jobs, missing, scenarios, seed):
            place[name] = found
            ordered = {name: place[name] for name in names if name in place}
            place.clear()
            place.update(ordered)
            write(results)
    if only is None and not results["pruning"]:
        scenarios = build_scenarios(num_cases, seed)
        for name in PRUNINGS:
            results["pruning"][name] = count_seen_cells(presets()[name], scenarios)
        write(results)


def save(results: dict[str, Any]) -> None:
    """Write the results with their claims."""
    results["claims"] = check_claims(results)
    write_results(RESULTS, results)


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("methods", __doc__)
    parser.add_argument("--only", nargs="+", metavar="PRESET", help="run these presets only, and write nothing")
    parser.add_argument("--missing", action="store_true", help="run what the committed results lack")
    parser.add_argument("--cases", type=int, default=32, help="cases of each scenario (32)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    results = {
        "num_cases": options.cases,
        "seed": options.seed,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "convention": "mean_acceptance_length includes the bonus token",
        "methods": {},
        "video": {"methods": {}},
        "pruning": {},
    }
    if options.missing:
        results = read_results(RESULTS)
    run_into(results, options.only, save if options.only is None else lambda _: None)
    print(acceptance_table(results), video_table(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
