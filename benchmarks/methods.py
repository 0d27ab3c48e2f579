"""Every method on every scenario of the zoo, with the same seeds: acceptance, cost, quality, equality.

    python -m benchmarks.methods                  # all presets of the zoo; writes results/methods.json
    python -m benchmarks.methods --missing        # those that the committed JSON lacks, with the same cases and seed
    python -m benchmarks.methods --only tabed_mt  # some of them, printed only
    python -m benchmarks.methods --table          # the tables of the committed JSON

A method is whatever its preset says. Lossless methods are compared with plain decoding token by token; lossy ones are
reported with their quality, and with what the drafter alone would have written, with all visual columns and pruned.
Presets `zoo_video_*` run on the video pair. Every ratio has its standard error over cases beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from actors.loading.method import build_method
from actors.loading.pair import Pair, load
from benchmarks.claims import check_claims
from benchmarks.deciding import ratio_error
from benchmarks.follow_drafter import FollowDrafter
from benchmarks.kept_columns import count_seen_cells
from benchmarks.scenarios import Case, attribute_overlap, build_scenarios, build_video_scenarios
from benchmarks.tables import acceptance_table, print_tables, video_table
from configs.load import load_preset
from configs.method import Method as MethodChoice
from configs.presets import PRESETS
from configs.schema import CaptionJob
from decoding import Completion, Engine, Request, Sampling
from decoding.contracts import Method

RESULTS = Path(__file__).parent / "results" / "methods.json"
MAX_NEW_TOKENS = 160
SLOTS = 32
MAX_CONTEXT_TOKENS = 768


ALONE = {"drafter_alone": ("plain", "sd_chain"), "video_drafter_alone": ("video_plain", "video_sd")}
"""The drafter in the target's place: the preset that it runs, and the one whose drafter it is."""
PRUNED_ALONE = {"pruned_drafter_alone": "lvspec", "video_pruned_drafter_alone": "video_lvspec"}
"""What LVSpec's drafter writes from the columns that it sees, and the preset of it."""
PRUNINGS = ("specvlm", "specvlm_uniform")


def presets() -> dict[str, CaptionJob]:
    """The zoo's presets by name, plain decoding first; those of videos stand in `video_presets`."""
    return _presets(video=False)


def video_presets() -> dict[str, CaptionJob]:
    """The zoo's presets on videos by name, plain decoding first."""
    return _presets(video=True)


def _presets(video: bool) -> dict[str, CaptionJob]:
    found = {
        name.removeprefix("zoo_"): load_preset(CaptionJob, name)
        for name in sorted(PRESETS)
        if re.match("zoo_(?!images_)", name) and name.startswith("zoo_video_") == video
    }
    first = "video_plain" if video else "plain"
    return {first: found.pop(first), **found}


def run_cases(pair: Pair, engine: Engine, cases: list[Case], sampling: Sampling, seed: int) -> dict[str, Completion]:
    """All completions of one scenario by case id.

    Raises:
        RuntimeError: a case gave an error or none at all; a benchmark that drops cases measures nothing.
    """
    requests = [Request(c.case_id, pair.render(c.messages), c.images, sampling, seed, videos=c.videos) for c in cases]
    done = {completion.sample_id: completion for completion in engine.run(requests)}
    broken = [c for c in done.values() if c.error is not None]
    if broken or len(done) != len(cases):
        raise RuntimeError(
            f"{len(cases) - len(done)} cases lost, {len(broken)} failed: {[b.error for b in broken][:2]}"
        )
    return done


def measure(
    cases: list[Case], done: dict[str, Completion], plain: dict[str, Completion] | None, target_forwards: int
) -> dict[str, Any]:
    """One cell of the tables. `mean_acceptance_length` counts the bonus token; it is total over total, not a mean of
    means, so long texts weigh more. `…_se` is a standard error over cases."""
    told = [done[case.case_id].telemetry for case in cases]
    steps = sum(t.num_spec_steps for t in told)
    accepted = sum(t.num_accepted_draft_tokens for t in told)
    drafted = sum(t.num_draft_tokens for t in told)
    tokens = sum(len(c.token_ids) for c in done.values())
    depth = max(len(t.acceptance_histogram) for t in told)
    histogram = [sum(t.acceptance_histogram[i] for t in told if i < len(t.acceptance_histogram)) for i in range(depth)]
    cell: dict[str, Any] = {
        "num_cases": len(cases),
        "num_tokens": tokens,
        "mean_acceptance_length": 1.0 + accepted / steps if steps else 1.0,
        "acceptance_length_se": ratio_error(
            [t.num_accepted_draft_tokens for t in told], [t.num_spec_steps for t in told]
        ),
        "drafted_per_step": drafted / steps if steps else 0.0,
        "target_forwards_per_token": sum(t.target_forwards for t in told) / tokens,
        "drafter_forwards_per_step": sum(t.drafter_forwards for t in told) / steps if steps else 0.0,
        "relaxed_share": sum(t.num_relaxed_accepts for t in told) / max(accepted, 1),
        "acceptance_histogram": histogram,
        "batch_forwards": target_forwards,
    }
    scored = [(case, done[case.case_id].text) for case in cases if case.score is not None]
    if scored:
        pairs = [case.score(text) for case, text in scored if case.score is not None]
        cell["accuracy"] = sum(right for right, _ in pairs) / max(1, sum(stated for _, stated in pairs))
        cell["accuracy_se"] = ratio_error(*zip(*pairs, strict=True))
    told_words = [attribute_overlap(done[case.case_id].text, case.truth) for case in cases if case.truth]
    if told_words:
        shared, said, true = (sum(column) for column in zip(*told_words, strict=True))
        cell["attribute_f1"] = 2 * shared / max(1, said + true)
        cell["attribute_f1_se"] = ratio_error([2 * s for s, _, _ in told_words], [a + b for _, a, b in told_words])
    if plain is not None:
        same = sum(done[case.case_id].token_ids == plain[case.case_id].token_ids for case in cases)
        cell["equal_share"] = same / len(cases)
    return cell


def run_method(
    pair: Pair,
    choice: MethodChoice,
    scenarios: dict[str, list[Case]],
    sampling: Sampling,
    plain: dict[str, dict[str, Completion]] | None,
    seed: int,
    follow_drafter: bool = False,
) -> tuple[dict[str, Any], dict[str, dict[str, Completion]]]:
    """One method over all scenarios: its cells and its completions; with `follow_drafter` the drafter decides alone."""
    cells: dict[str, Any] = {}
    completions: dict[str, dict[str, Completion]] = {}
    for name, cases in scenarios.items():
        method = build_method(choice, pair.drafter, pair.target)
        if follow_drafter:
            method = Method(method.drafter, method.tree, FollowDrafter())
        engine = Engine(pair.target, method, SLOTS, MAX_CONTEXT_TOKENS)
        done = run_cases(pair, engine, cases, sampling, seed)
        completions[name] = done
        cells[name] = measure(cases, done, plain[name] if plain else None, engine.stats.target_forwards)
    return cells, completions


def run_all(
    jobs: dict[str, CaptionJob], names: list[str], scenarios: dict[str, list[Case]], seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every named preset of `jobs`, greedy (or at its own temperature), against plain decoding at the same temperature:
    each name with its result, as soon as it is there.

    Of the `names` those of `ALONE` and `PRUNED_ALONE` are no presets; they run where their presets are among `jobs`.
    """
    first = next(iter(jobs))
    plain: dict[float, dict[str, dict[str, Completion]]] = {}
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
        beside, followed = plain[sampling.temperature], name in PRUNED_ALONE
        cells, _ = run_method(load(job), job.method, scenarios, sampling, beside, seed, followed)
        result = {
            "verify_mode": "other model" if name in ALONE or followed else job.method.verify_mode,
            "temperature": sampling.temperature,
            "acceptance": "follow" if followed else job.method.acceptance.kind,
            "scenarios": cells,
        }
        lengths = "  ".join(f"{key} {cell['mean_acceptance_length']:.2f}" for key, cell in cells.items())
        print(f"{name:18s} {time.perf_counter() - start:6.1f} s  {lengths}", file=sys.stderr, flush=True)
        yield name, result


def names_of(jobs: dict[str, CaptionJob]) -> list[str]:
    """All that is run for a set of presets: they themselves, and what their drafters write alone."""
    alone = [name for name, (preset, _) in ALONE.items() if preset in jobs]
    return [*jobs, *alone, *(name for name, preset in PRUNED_ALONE.items() if preset in jobs)]


def run_into(results: dict[str, Any], only: list[str] | None, write: Callable[[dict[str, Any]], None]) -> None:
    """Run what `results` lacks (of `only`, if given) and put it there, calling `write` after each method."""
    num_cases, seed = results["num_cases"], results["seed"]
    for jobs, build, place in (
        (presets(), build_scenarios, results["methods"]),
        (video_presets(), build_video_scenarios, results["video"]["methods"]),
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


def fresh(num_cases: int, seed: int) -> dict[str, Any]:
    """Results without any cell."""
    return {
        "num_cases": num_cases,
        "seed": seed,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "convention": "mean_acceptance_length includes the bonus token",
        "methods": {},
        "video": {"methods": {}},
        "pruning": {},
    }


def save(results: dict[str, Any]) -> None:
    """Write the results with the claims that follow from them."""
    results["claims"] = check_claims(results)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run or print; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="PRESET", help="run these presets only, and write nothing")
    parser.add_argument("--missing", action="store_true", help="run what the committed results lack, as they were run")
    parser.add_argument("--cases", type=int, default=32, help="cases of each scenario (32)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None, help="torch threads (torch's own choice)")
    parser.add_argument("--table", action="store_true", help="print the tables of the committed JSON and stop")
    parser.add_argument("--ablations", action="store_true", help="the papers' further tables: benchmarks.ablations")
    options = parser.parse_args(arguments)
    if options.ablations:
        from benchmarks import ablations  # which is made of this module

        return ablations.main(["--table"] if options.table else [])
    if options.table:
        committed = json.loads(RESULTS.read_text())
        committed["claims"] = check_claims(committed)
        print_tables(committed)
        return 0
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    results = json.loads(RESULTS.read_text()) if options.missing else fresh(options.cases, options.seed)
    if options.only is not None:
        run_into(results, options.only, lambda _: None)
        print(acceptance_table(results), video_table(results), sep="\n\n")
        return 0
    run_into(results, None, save)
    print_tables(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
