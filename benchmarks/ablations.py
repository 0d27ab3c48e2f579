"""Reproduces the papers' ablation tables on the zoo's models, varying one setting at a time.

    python -m benchmarks.ablations    # writes results/ablations.json; minutes
    python -m benchmarks.tables       # the tables and the plots

A variant is a preset and dotted overrides, checked by the same schema as a job.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from actors.loading.method import build_method
from actors.loading.pair import Pair, load
from benchmarks.harness.engines import plain_step_s
from benchmarks.harness.results import command_line, progress, results_file
from benchmarks.methods.runs import MAX_CONTEXT_TOKENS, MAX_NEW_TOKENS, run_method
from benchmarks.methods.scenarios import Case, build_scenarios
from benchmarks.tables.parts import finish
from configs.load import load_preset
from configs.schema import CaptionJobConfig
from decoding import Engine, Request, Sampling
from models.target import Target

RESULTS = results_file("ablations")
SCENARIOS = ("single", "second_turn", "clip", "story")
POLICIES = ("static", "random", "matches", "error", "inverse_softmax", "inverse_linear", "adaboost")
RATIOS = (0.0, 0.5, 0.8, 0.9, 0.95)

DRAFTERS = {"0.37 M": "drafter", "0.71 M": "captioner", "3.1 M (the target itself)": "target"}
CAPTION = (
    "{kind: caption, path: zoo/checkpoints/caption_captioner, dtype: float32, num_beams: 1, "
    'prompt: "USER: <image>\\nList every object in the image. ASSISTANT:"}'
)

Variant = tuple[str, tuple[str, ...]]
GROUPS: dict[str, dict[str, Variant]] = {
    "TABED: block length γ": {
        f"{name}, γ = {length}": (preset, (f"method.tree.length={length}",))
        for length in (3, 5, 7)
        for name, preset in (("M", "sd_chain"), ("T", "sd_chain_text"), ("MT", "tabed_mt"))
    },
    "TABED: window h": {
        f"h = {window or 'all'}": ("tabed_mt", (f"method.drafter.ensemble.window={window}",))
        for window in (1, 4, 16, 0)
    },
    "TABED: weight policy": {
        policy: ("tabed_mt", (f"method.drafter.ensemble.policy={policy}",)) for policy in POLICIES
    },
    "TABED: distance, policy error": {
        distance: ("tabed_mt", ("method.drafter.ensemble.policy=error", f"method.drafter.ensemble.distance={distance}"))
        for distance in ("kl", "tvd")
    },
    "replacement of image tokens (chain of 5)": {
        "M: the image": ("sd_chain", ()),
        "T: a newline": ("sd_chain_text", ()),
        "C: a caption": ("sd_chain", (f"method.contexts=[{CAPTION}]",)),
        "P: pooled 2×2": ("sd_chain_pooled", ()),
    },
    "drafter size, strict chain of 5": {
        f"{name} parameters": ("sd_chain", (f"model.drafter.path=zoo/checkpoints/caption_{role}",))
        for name, role in DRAFTERS.items()
    },
    "drafter size, LVSpec": {
        f"{name} parameters": ("lvspec", (f"model.drafter.path=zoo/checkpoints/caption_{role}",))
        for name, role in DRAFTERS.items()
    },
    "LVSpec: λ": {
        f"λ = {loose}": ("lvspec", (f"method.acceptance.loose={loose}",)) for loose in (0.0, 0.1, 0.3, 0.5, 0.7)
    },
    "LVSpec: λ without position shift": {
        f"λ = {loose}": ("lvspec", (f"method.acceptance.loose={loose}", "method.acceptance.position_shift=false"))
        for loose in (0.1, 0.3, 0.5, 0.7)
    },
    "LVSpec: top N": {f"N = {top}": ("lvspec", (f"method.acceptance.top_visual={top}",)) for top in (1, 5, 10, 30)},
    "LVSpec: relevance of": {
        kind: ("lvspec", (f"method.acceptance.relevance_of={kind}",)) for kind in ("draft", "before", "embedding")
    },
    "random relaxation: probability": {
        f"p = {p}": ("random", (f"method.acceptance.probability={p}",)) for p in (0.05, 0.1, 0.25, 0.5)
    },
    "SAGE: pruning": {
        f"{int(100 * ratio)} %": ("sage", (f"method.contexts=[{{kind: pruned, ratio: {ratio}, guidance: attention}}]",))
        for ratio in RATIOS
    },
    "SpecVLM: pruning and positions": {
        f"{int(100 * ratio)} %, {positions}": (
            "specvlm",
            (f"method.contexts=[{{kind: pruned, ratio: {ratio}, guidance: attention, positions: {positions}}}]",),
        )
        for ratio in (0.5, 0.9)
        for positions in ("original", "compact")
    },
    "output length, SAGE": {
        f"{length} tokens": ("sage", (f"sampling.max_new_tokens={length}",)) for length in (16, 32, 64, 160)
    },
}


def run_groups(cases: dict[str, list[Case]], seed: int) -> dict[str, Any]:
    """Measure every variant of every group: acceptance length per scenario, quality on single images."""
    plain_job = load_preset(CaptionJobConfig, "zoo_plain")
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
    _, plain = run_method(load(plain_job), plain_job.method, cases, sampling, None, seed)
    results: dict[str, Any] = {}
    for group, variants in GROUPS.items():
        start = time.perf_counter()
        results[group] = {}
        for label, (preset, overrides) in variants.items():
            job = load_preset(CaptionJobConfig, f"zoo_{preset}", overrides)
            limit = min(job.sampling.max_new_tokens, MAX_NEW_TOKENS)
            cells, _ = run_method(load(job), job.method, cases, Sampling(max_new_tokens=limit), plain, seed)
            results[group][label] = {
                "acceptance_length": {name: cell["mean_acceptance_length"] for name, cell in cells.items()},
                "drafted_per_step": cells["single"]["drafted_per_step"],
                "accuracy": cells["single"]["accuracy"],
                "attribute_f1": cells["single"]["attribute_f1"],
                "equal_share": cells["single"]["equal_share"],
            }
        progress(f"{group:40s} {time.perf_counter() - start:6.1f} s")
    return results


def expected_speedup(acceptance_length: float, length: int, ratio: float) -> float:
    """Return the speed-up of TABED's Eq. 1: τ / (γ · T_q / T_p + 1), τ with the bonus token, `ratio` = T_q / T_p."""
    return acceptance_length / (length * ratio + 1.0)


def measure_latencies(pair: Pair, cases: list[Case]) -> dict[str, float]:
    """Return the milliseconds of a plain decoding step of target and drafter at batch 1."""
    assert isinstance(pair.drafter, Target)
    sampling = Sampling(max_new_tokens=60, ignore_eos=True)
    requests = [Request(case.case_id, pair.render(case.messages), case.images, sampling) for case in cases[:6]]
    return {
        f"{name}_ms": 1000 * plain_step_s(model, 1, MAX_CONTEXT_TOKENS, requests)
        for name, model in (("target", pair.target), ("drafter", pair.drafter))
    }


def trace(job: CaptionJobConfig, cases: list[Case], seed: int, key: str) -> dict[str, list[Any]]:
    """Return the method's telemetry value `key` after every step, by case; each case is decoded at batch 1."""
    pair = load(job)
    method = build_method(job.method, pair.drafter, pair.target)
    engine = Engine(pair.target, method, 1, MAX_CONTEXT_TOKENS)
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
    traces: dict[str, list[Any]] = {}
    for case in cases:
        engine.submit(Request(case.case_id, pair.render(case.messages), case.images, sampling, seed))
        values = traces[case.case_id] = []
        while engine.has_work:
            engine.step()
            values.append((method.drafter.extras(0) | method.tree.extras(0))[key])
    return traces


def autocorrelation(traces: dict[str, list[float]], lag: int = 1) -> float:
    """Return the correlation between a step's value and the value `lag` steps earlier, over all samples."""
    pairs = [(a, b) for values in traces.values() for a, b in zip(values[:-lag], values[lag:], strict=True)]
    return statistics.correlation([a for a, _ in pairs], [b for _, b in pairs])


def run_all(num_cases: int, seed: int) -> dict[str, Any]:
    """Measure the variants, the expected speed-ups and the telemetry traces."""
    scenarios = build_scenarios(num_cases, seed)
    cases = {name: scenarios[name] for name in SCENARIOS}
    groups = run_groups(cases, seed)
    chain = load_preset(CaptionJobConfig, "zoo_sd_chain")
    latencies = measure_latencies(load(chain), cases["single"])
    ratio = latencies["drafter_ms"] / latencies["target_ms"]
    speedups = {
        label: expected_speedup(cell["acceptance_length"]["single"], int(label[-1]), ratio)
        for label, cell in groups["TABED: block length γ"].items()
    }
    sage = load_preset(CaptionJobConfig, "zoo_sage")
    alphas = trace(sage, cases["single"], seed, "confidence_last")
    tabed = load_preset(CaptionJobConfig, "zoo_tabed_mt")
    examples = [cases["single"][0], cases["second_turn"][0], cases["story"][0]]
    weights = trace(tabed, examples, seed, "ensemble_weights")
    return {
        "num_cases": num_cases,
        "seed": seed,
        "torch": torch.__version__,
        "convention": "acceptance lengths include the bonus token",
        "groups": groups,
        "latencies": latencies,
        "latency_ratio": ratio,
        "expected_speedup": speedups,
        "ensemble_weights": {name: [row[0] for row in values] for name, values in weights.items()},
        "confidence_autocorrelation": {str(lag): autocorrelation(alphas, lag) for lag in (1, 2, 4)},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("ablations", __doc__)
    parser.add_argument("--cases", type=int, default=16, help="cases of each scenario (16)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    return finish(RESULTS, run_all(options.cases, options.seed))


if __name__ == "__main__":
    sys.exit(main())
