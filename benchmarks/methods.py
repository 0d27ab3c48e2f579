"""Every method on every scenario of the zoo, with the same seeds: acceptance, cost, quality, equality.

    python -m benchmarks.methods                  # all presets configs/zoo_*.yaml; writes results/methods.json
    python -m benchmarks.methods --only tabed_mt  # some of them, printed only
    python -m benchmarks.methods --table          # the tables of the committed JSON

A method is whatever its preset says. Lossless methods are compared with plain decoding token by token; lossy ones are
reported with their quality, and with what the drafter alone would have written.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from actors.method import build_method
from actors.pair import Pair, load
from benchmarks.claims import check_claims
from benchmarks.scenarios import Case, attribute_overlap, build_scenarios
from benchmarks.tables import print_tables
from configs.load import load_job
from configs.method import Method as MethodChoice
from configs.schema import CaptionJob
from decoding import Completion, Engine, Request, Sampling

RESULTS = Path(__file__).parent / "results" / "methods.json"
PRESETS = Path("configs")
MAX_NEW_TOKENS = 160
SLOTS = 16
MAX_CONTEXT_TOKENS = 768


def presets() -> dict[str, CaptionJob]:
    """The zoo's presets by name, plain decoding first."""
    files = [
        path for path in sorted(PRESETS.glob("zoo_*.yaml")) if not path.stem.startswith(("zoo_images_", "zoo_video_"))
    ]
    found = {path.stem.removeprefix("zoo_"): load_job(CaptionJob, path) for path in files}
    return {"plain": found.pop("plain"), **found}


def run_cases(pair: Pair, engine: Engine, cases: list[Case], sampling: Sampling, seed: int) -> dict[str, Completion]:
    """All completions of one scenario by case id.

    Raises:
        RuntimeError: a case gave an error or none at all; a benchmark that drops cases measures nothing.
    """
    requests = [Request(c.case_id, pair.render(c.messages), c.images, sampling, seed) for c in cases]
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
    means, so long texts weigh more."""
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
    told_words = [attribute_overlap(done[case.case_id].text, case.truth) for case in cases if case.truth]
    if told_words:
        shared, said, true = (sum(column) for column in zip(*told_words, strict=True))
        cell["attribute_f1"] = 2 * shared / max(1, said + true)
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
) -> tuple[dict[str, Any], dict[str, dict[str, Completion]]]:
    """One method over all scenarios: its cells and its completions."""
    cells: dict[str, Any] = {}
    completions: dict[str, dict[str, Completion]] = {}
    for name, cases in scenarios.items():
        method = build_method(choice, pair.drafter, pair.target)
        engine = Engine(pair.target, method, SLOTS, MAX_CONTEXT_TOKENS)
        done = run_cases(pair, engine, cases, sampling, seed)
        completions[name] = done
        cells[name] = measure(cases, done, plain[name] if plain else None, engine.stats.target_forwards)
    return cells, completions


def run_all(names: list[str], num_cases: int, seed: int) -> dict[str, Any]:
    """Every named preset, greedy (or at its own temperature), against plain decoding at the same temperature."""
    scenarios = build_scenarios(num_cases, seed)
    jobs = presets()
    plain: dict[float, dict[str, dict[str, Completion]]] = {}
    results: dict[str, Any] = {}
    for name in ["plain", *(n for n in names if n != "plain"), "drafter_alone"]:
        start = time.perf_counter()
        alone = name == "drafter_alone"
        job = jobs["plain"] if alone else jobs[name]
        if alone:
            job = job.model_copy(
                update={"model": job.model.model_copy(update={"target": jobs["sd_chain"].model.drafter})}
            )
        sampling = Sampling(**{**job.sampling.model_dump(), "max_new_tokens": MAX_NEW_TOKENS})
        pair = load(job)
        if sampling.temperature not in plain:
            base = load(jobs["plain"])
            _, plain[sampling.temperature] = run_method(base, jobs["plain"].method, scenarios, sampling, None, seed)
        cells, _ = run_method(pair, job.method, scenarios, sampling, plain[sampling.temperature], seed)
        results[name] = {
            "verify_mode": "other model" if alone else job.method.verify_mode,
            "temperature": sampling.temperature,
            "acceptance": job.method.acceptance.kind,
            "scenarios": cells,
        }
        lengths = "  ".join(f"{key} {cell['mean_acceptance_length']:.2f}" for key, cell in cells.items())
        print(f"{name:18s} {time.perf_counter() - start:6.1f} s  {lengths}", file=sys.stderr, flush=True)
    return {
        "num_cases": num_cases,
        "seed": seed,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "convention": "mean_acceptance_length includes the bonus token",
        "methods": results,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run or print; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="PRESET", help="run these presets only, and write nothing")
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
        committed["claims"] = check_claims(committed["methods"])
        print_tables(committed)
        return 0
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    results = run_all(options.only or list(presets()), options.cases, options.seed)
    if options.only is None:
        results["claims"] = check_claims(results["methods"])
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print_tables(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
