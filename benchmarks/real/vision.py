"""Measures methods on the vision pair of `python -m zoo.real_vision`: acceptance, cost, quality, equality.

    python -m zoo.real; python -m zoo.real_vision       # once: target, drafters and scenes
    python -m benchmarks.real.vision                    # settings that results/real_vision.json lacks
    python -m benchmarks.real.vision --scenario clip    # the same with clips; writes results/real_vision_clips.json

Cases are dense scenes that neither model was trained on: images, or clips of 8 frames with 2,048 visual columns.
Acceptance is measured in float32: lossless methods are compared with plain decoding token by token, under the same
noise if they are sampled. `benchmarks.real.speed` measures speed.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence

import torch

from actors.loading.pair import load
from benchmarks.harness.markdown import Results
from benchmarks.harness.results import (
    command_line,
    cores,
    machine,
    progress,
    read_results,
    results_file,
    write_results,
)
from benchmarks.methods.runs import Completions, run_method
from benchmarks.real.vision_settings import (
    DRAFTERS,
    FOLDER,
    MAX_CONTEXT_TOKENS,
    NUM_CASES,
    SEED,
    SLOTS,
    Setting,
    build_cases,
    job_of,
    settings,
)
from benchmarks.tables.parts import finish
from decoding import Sampling
from zoo.quality import MAX_DENSE_TOKENS
from zoo.real.drafters import digest, read_notes
from zoo.real_vision.__main__ import DRAFTERS as FILES

RESULTS = {"dense": results_file("real_vision"), "clip": results_file("real_vision_clips")}
"""Scenario → file of results."""
FIGURES = ("num_taught_rows", "num_epochs", "seconds", "top1_accuracy", "top3_accuracy", "mean_acceptance_length")


def run_missing(results: Results, scenario: str) -> None:
    """Measure the settings that `results` lacks, writing the file after each."""
    cases = {scenario: build_cases(scenario, NUM_CASES[scenario])}
    plain: dict[float, Completions] = {}

    def run(setting: Setting, name: str) -> tuple[Results, Completions]:
        gc.collect()  # frees the engines of the setting before, which are in reference cycles
        start_s = time.perf_counter()
        pair = load(job_of(setting, "float32"))
        sampling = Sampling(**{**pair.config.sampling.options, "max_new_tokens": MAX_DENSE_TOKENS})
        method, temperature = pair.config.method, sampling.temperature
        if setting.method != "plain" and temperature not in plain:
            _, plain[temperature] = run(
                Setting("plain", None, (f"sampling.temperature={temperature}",)), "the reference"
            )
        reference = plain.get(temperature)
        cells, done = run_method(
            pair,
            method,
            cases,
            sampling,
            reference,
            SEED,
            setting.follow_drafter,
            max_context_tokens=MAX_CONTEXT_TOKENS[scenario],
            slots=SLOTS[scenario],
        )
        length = cells[scenario]["mean_acceptance_length"]
        progress(f"{name:28s} {time.perf_counter() - start_s:6.1f} s  {length:.2f}")
        return {
            "verify_mode": "other model" if setting.follow_drafter else method.verify_mode,
            "temperature": temperature,
            "acceptance": "follow" if setting.follow_drafter else method.acceptance.kind,
            "drafter": setting.drafter,
            "scenarios": cells,
        }, done

    for name, setting in settings(scenario).items():
        if name in results["methods"]:
            continue
        results["methods"][name], done = run(setting, name)
        if setting.method == "plain":
            plain[results["methods"][name]["temperature"]] = done
        save(results, scenario)


def save(results: Results, scenario: str) -> None:
    """Write the results in the order of the settings."""
    measured = results["methods"]
    results["methods"] = {name: measured[name] for name in settings(scenario) if name in measured}
    results["drafters"] = trained_drafters()
    write_results(RESULTS[scenario], results)


def trained_drafters() -> Results:
    """Return layers of the shipped drafters, and what their training measured before they were packed, by name."""
    results: Results = {}
    for name, path in FILES.items():
        notes = read_notes(path)
        measured = {key: notes["measured"][key] for key in FIGURES}
        results[name] = {"num_layers": len(notes["layers"]), **measured, "file_bytes": path.stat().st_size}
        results[name]["sha256"] = digest(path)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("real_vision", __doc__)
    parser.add_argument("--scenario", choices=RESULTS, default="dense", help="images or clips (images)")
    parser.add_argument("--threads", type=int, default=len(cores()), help="(all cores)")
    options = parser.parse_args(arguments)
    for needed in (FOLDER / "target", *DRAFTERS.values()):
        if not needed.exists():
            progress(f"refused: {needed} does not exist; run `python -m zoo.real_vision` first")
            return 2
    torch.set_num_threads(options.threads)
    about = {"machine": machine(), "torch": torch.__version__}
    path = RESULTS[options.scenario]
    results: Results = read_results(path) if path.exists() else {}
    if results.get("drafters", trained_drafters()) != trained_drafters():
        progress(f"refused: {path} was measured with other drafters; remove it to measure these")
        return 2
    empty = {"setting": about, "scenario": options.scenario, "seed": SEED, "methods": {}}
    results = {**empty, "num_cases": NUM_CASES[options.scenario], **results}
    run_missing(results, options.scenario)
    return finish(path, results)


if __name__ == "__main__":
    sys.exit(main())
