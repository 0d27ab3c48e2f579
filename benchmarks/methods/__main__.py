"""Measures every method on every scenario of the zoo, with the same seeds: acceptance, cost, quality, equality.

    python -m benchmarks.methods                  # all presets of the zoo; writes results/methods.json
    python -m benchmarks.methods --missing        # presets that the committed JSON lacks, with the same cases and seed

Lossless methods are compared with plain decoding token by token; lossy ones are reported with their quality, and with
the output of the drafter alone, with all visual tokens and pruned. Presets `zoo_video_*` run on the video pair. Every
ratio has its standard error over cases.
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
from benchmarks.methods.runs import MAX_NEW_TOKENS, Completions, run_method
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


def presets(video: bool = False) -> dict[str, CaptionJobConfig]:
    """Return the zoo's presets on images or on videos by name, plain decoding first."""
    first = "zoo_video_plain" if video else "zoo_plain"
    names = [name for name in sorted(PRESETS, key=lambda name: (name != first, name)) if name.startswith("zoo_")]
    return {
        name.removeprefix("zoo_"): load_preset(CaptionJobConfig, name)
        for name in names
        if not name.startswith("zoo_images_") and name.startswith("zoo_video_") == video
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
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every name (a preset of `jobs`, or a key of `ALONE` or `PRUNED_ALONE`) with its result; the reference is
    plain decoding at the same temperature."""
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
        cells, _ = run_method(load(job), job.method, scenarios, sampling, plain[temperature], seed, followed)
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
        )


def run_missing(results: dict[str, Any]) -> None:
    """Run the methods that `results` lacks, writing the file after each."""
    num_cases, seed = results["num_cases"], results["seed"]
    for jobs, built, build, methods in (
        (presets(), (), build_scenarios, results["methods"]),
        (presets(video=True) | built_jobs(), BUILT, build_video_scenarios, results["video"]["methods"]),
    ):
        alone = {**{name: preset for name, (preset, _) in ALONE.items()}, **PRUNED_ALONE}
        alone = {name: preset for name, preset in alone.items() if preset in jobs}
        names = [*dict.fromkeys([*jobs, *built]), *alone]
        missing = [name for name in names if name not in methods and (name in jobs or name in alone)]
        scenarios = build(num_cases, seed) if missing else {}
        for name, result in run_all(jobs, missing, scenarios, seed):
            methods[name] = result
            ordered = {name: methods[name] for name in names if name in methods}
            methods.clear()
            methods.update(ordered)
            write_results(RESULTS, results)


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
    run_missing(results)
    print(show("methods", results, "acceptance", "video_methods"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
