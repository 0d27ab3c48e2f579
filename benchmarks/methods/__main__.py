"""Measures every method on every scenario of the zoo, with the same seeds: acceptance, cost, quality, equality.

    python -m benchmarks.methods                  # all presets of the zoo; writes results/methods.json
    python -m benchmarks.methods --missing        # presets that the committed JSON lacks, with the same cases and seed

Lossless methods are compared with plain decoding token by token; lossy ones are reported with their quality, and with
the output of the drafter alone, with all visual tokens and pruned. Presets `zoo_video_*` run on the video pair. Every
ratio has its standard error over cases; the counts of single samples, which paired tests read, are written to
results/samples/methods.parquet.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from actors.loading.pair import load
from benchmarks.harness.results import command_line, progress, read_results, results_file, write_results
from benchmarks.harness.samples import Row, read_samples, samples_file, write_samples
from benchmarks.methods.runs import MAX_NEW_TOKENS, Completions, run_method, sample_rows
from benchmarks.methods.scenarios import Case, build_scenarios, build_video_scenarios
from benchmarks.tables.parts import show
from configs.load import load_preset
from configs.presets import PRESETS
from configs.schema import CaptionJobConfig
from decoding import Sampling

RESULTS = results_file("methods")
ALONE = {"drafter_alone": ("plain", "sd_chain"), "video_drafter_alone": ("video_plain", "video_sd")}
"""Name → (preset to run with the drafter as its target, preset that the drafter is taken from)."""
PRUNED_ALONE = {"pruned_drafter_alone": "lvspec", "video_pruned_drafter_alone": "video_lvspec"}
"""Name of LVSpec's pruned drafter alone → its preset."""
BUILT = {"video_eagle2": ("eagle2_25", "video_eagle"), "video_eagle3": ("eagle3_25", "video_eagle3")}
"""Name → method, and the head that `python -m zoo.build HEAD --out out/zoo` trains; these heads do not
ship, and their rows are measured if they exist."""
BUILT_HEADS = Path("out/zoo")
DEEP = ("method.tree.branching=[2,2,2,2,2]",)
VARIED: dict[str, tuple[str, tuple[str, ...]]] = {
    "eagle3_lvspec": ("eagle3", ("method.tree={kind: chain, length: 10}", "method.acceptance={kind: lvspec}")),
    "fly_paper": ("fly", ("method.acceptance.min_entropy=0.1",)),
    "fly_window_1": ("fly", ("method.acceptance.min_entropy=0.1", "method.acceptance.window=1")),
    "fly_window_1_low": ("fly", ("method.acceptance.min_entropy=0.05", "method.acceptance.window=1")),
    "fly_window_2": ("fly", ("method.acceptance.min_entropy=0.1", "method.acceptance.window=2")),
    "fly_gate_0.1": ("fly_gate", ("method.acceptance.min_entropy=0.1",)),
    "fly_gate_0.15": ("fly_gate", ("method.acceptance.min_entropy=0.15",)),
    "fly_gate_0.175": ("fly_gate", ("method.acceptance.min_entropy=0.175",)),
    **{
        f"lvspec_no_shift_{loose}": (
            "lvspec",
            (f"method.acceptance.loose={loose}", "method.acceptance.position_shift=false"),
        )
        for loose in (0.2, 0.5, 0.7)
    },
    **{f"lvspec_{loose}": ("lvspec", (f"method.acceptance.loose={loose}",)) for loose in (0.2, 0.3, 0.9)},
    "lvspec_weak": ("lvspec", ("method.acceptance.loose=0.3", "method.acceptance.top_visual=5")),
    "lvspec_top_100": ("lvspec", ("method.acceptance.top_visual=100",)),
    **{f"random_{p}": ("random", (f"method.acceptance.probability={p}",)) for p in (0.25, 0.75)},
    "sage_80": ("sage", ("method.contexts=[{kind: pruned, ratio: 0.8, guidance: attention}]",)),
    "sage_no_history": ("sage", ("method.tree.history_window=0",)),
    "sage_depth_12": ("sage", ("method.tree.depth_cap=12",)),
    "specvlm_11": ("specvlm", ("method.tree={kind: static, branching: [4, 1, 1]}",)),
    **{f"tabed_{contexts}_tree_deep": (f"tabed_{contexts}_tree", DEEP) for contexts in ("m", "t", "mt")},
    "tabed_mtcp_softmax": ("tabed_mtcp", ("method.drafter.ensemble.policy=inverse_softmax",)),
}
"""Name → (preset, overrides): grids and settings of the papers that are no presets."""


def presets(video: bool = False) -> dict[str, CaptionJobConfig]:
    """Return the zoo's presets on images or on videos by name, plain decoding first."""
    first = "zoo_video_plain" if video else "zoo_plain"
    names = [name for name in sorted(PRESETS, key=lambda name: (name != first, name)) if name.startswith("zoo_")]
    return {
        name.removeprefix("zoo_"): load_preset(CaptionJobConfig, name)
        for name in names
        if not name.startswith("zoo_images_") and name.startswith("zoo_video_") == video
    }


def varied_jobs() -> dict[str, CaptionJobConfig]:
    """Return the jobs of `VARIED` by name."""
    return {
        name: load_preset(CaptionJobConfig, f"zoo_{preset}", overrides) for name, (preset, overrides) in VARIED.items()
    }


def built_jobs() -> dict[str, CaptionJobConfig]:
    """Return the jobs of `BUILT` whose heads exist."""
    return {
        name: load_preset(
            CaptionJobConfig, "zoo_videos", (f"method={method}", f"model.drafter.path={BUILT_HEADS / head}")
        )
        for name, (method, head) in BUILT.items()
        if (BUILT_HEADS / head).is_dir()
    }


def run_all(
    jobs: dict[str, CaptionJobConfig], names: list[str], scenarios: dict[str, list[Case]], seed: int
) -> Iterator[tuple[str, dict[str, Any], list[Row]]]:
    """Yield every name (a job of `jobs`, or a key of `ALONE` or `PRUNED_ALONE`) with its result and the rows of its
    samples; the reference is plain decoding at the same temperature."""
    base = next(iter(jobs.values()))
    plain: dict[float, Completions] = {}
    for name in names:
        start = time.perf_counter()
        job = jobs[ALONE[name][0] if name in ALONE else PRUNED_ALONE.get(name, name)]
        if name in ALONE:
            drafter = jobs[ALONE[name][1]].model.drafter
            job = job.model_copy(update={"model": job.model.model_copy(update={"target": drafter})})
        sampling = Sampling(**{**job.sampling.options, "max_new_tokens": MAX_NEW_TOKENS})
        temperature, followed = sampling.temperature, name in PRUNED_ALONE
        if temperature not in plain:
            _, plain[temperature] = run_method(load(base), base.method, scenarios, sampling, None, seed)
        cells, done = run_method(load(job), job.method, scenarios, sampling, plain[temperature], seed, followed)
        lengths = "  ".join(f"{key} {cell['mean_acceptance_length']:.2f}" for key, cell in cells.items())
        progress(f"{name:18s} {time.perf_counter() - start:6.1f} s  {lengths}")
        yield (
            name,
            {
                "verify_mode": "other model" if name in ALONE or followed else job.method.verify_mode,
                "temperature": temperature,
                "acceptance": "follow" if followed else job.method.acceptance.kind,
                "scenarios": cells,
            },
            [
                row
                for scenario, cases in scenarios.items()
                for row in sample_rows(name, scenario, cases, done[scenario], plain[temperature][scenario])
            ],
        )


def run_missing(results: dict[str, Any], path: Path, samples_path: Path) -> None:
    """Run the methods that `results` or their samples lack, writing both files after each."""
    num_cases, seed = results["num_cases"], results["seed"]
    samples: dict[str, list[Row]] = {}
    for row in read_samples(samples_path):
        samples.setdefault(row["method"], []).append(row)
    for jobs, built, build, methods in (
        (presets() | varied_jobs(), (), build_scenarios, results["methods"]),
        (presets(video=True) | built_jobs(), BUILT, build_video_scenarios, results["video"]["methods"]),
    ):
        alone = {**{name: preset for name, (preset, _) in ALONE.items()}, **PRUNED_ALONE}
        alone = {name: preset for name, preset in alone.items() if preset in jobs}
        names = [*dict.fromkeys([*jobs, *built]), *alone]
        missing = [
            name
            for name in names
            if (name not in methods or name not in samples) and (name in jobs or name in alone)
        ]
        scenarios = build(num_cases, seed) if missing else {}
        for name, result, rows in run_all(jobs, missing, scenarios, seed):
            methods[name], samples[name] = result, rows
            ordered = {name: methods[name] for name in names if name in methods}
            methods.clear()
            methods.update(ordered)
            write_samples(samples_path, [row for method in sorted(samples) for row in samples[method]])
            write_results(path, results)


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("methods", __doc__)
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
    }
    if options.missing:
        results = read_results(RESULTS)
    else:
        samples_file("methods").unlink(missing_ok=True)
    run_missing(results, RESULTS, samples_file("methods"))
    print(show("methods", results, "acceptance", "video_methods"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
