"""Measures methods on the vision pair of `python -m zoo.real_vision`: acceptance, cost, quality, equality.

    python -m zoo.real; python -m zoo.real_vision                             # once: target and scenes
    python -m jobs.train_drafter --config configs/jobs/train_real_vision.yaml # once: the strong drafter
    python -m jobs.train_drafter --config configs/jobs/train_real_vision.yaml head.num_layers=2 training.max_rows=96 \\
        output.path=out/real_vision/weak_drafter                              # once: the weak drafter
    python -m benchmarks.real.vision           # methods that results/real_vision.json lacks, of drafters that exist
    python -m benchmarks.real.vision --speed   # tokens per second, added to the same file

Cases are dense scenes that neither model was trained on. Acceptance is measured in float32: lossless methods are
compared with plain decoding token by token, under the same noise if they are sampled. Speed is measured in bfloat16.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from actors.loading.pair import Pair, load
from benchmarks.harness.claims import claims_table
from benchmarks.harness.markdown import Results, percent, table
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
from benchmarks.methods.scenarios import Case
from benchmarks.real.text import measure_speed, speed_table
from benchmarks.real.vision_claims import check_claims
from configs.load import load_job
from configs.schema import CaptionJob
from decoding import Request, Sampling
from zoo.quality import count_stated
from zoo.real_vision.labels import IMAGE_PX
from zoo.real_vision.quality import MAX_NEW_TOKENS, draw_asked, requests_of
from zoo.world.dense import PROMPTS, write_description
from zoo.world.render import render_scene
from zoo.world.scene import scene_rng

RESULTS = results_file("real_vision")
CONFIG = "configs/jobs/real_vision.yaml"
FOLDER = Path("out/real_vision")
DRAFTERS = {"strong": FOLDER / "drafter", "weak": FOLDER / "weak_drafter"}
SCENARIO = "dense"
NUM_CASES, SEED = 36, 41
FIGURES = ("num_taught_rows", "num_epochs", "seconds", "top1_accuracy", "top3_accuracy", "mean_acceptance_length")
HALF = "{kind: pruned, ratio: 0.5%s}"


@dataclass(frozen=True)
class Setting:
    """A method as a preset or a section, with a drafter of DRAFTERS or none, other overrides of the job, and whether
    drafts are accepted without the target's verdict."""

    method: str
    drafter: str | None = None
    overrides: tuple[str, ...] = ()
    follow_drafter: bool = False


def settings() -> dict[str, Setting]:
    """Return the measured settings by name, plain decoding of each temperature before the others."""
    hot = ("sampling.temperature=1",)
    found = {"plain": Setting("plain"), "plain_sampled": Setting("plain", None, hot)}
    found |= {name: Setting(name) for name in ("lookup", "suffix", "jacobi")}
    found["layer_skip"] = Setting(
        "{drafter: {kind: layer_skip, layers: [0, 1, 2, 3, 4, 5, 7, 10, 13, 16, 19, 22, 24, 25, 26, 27, 28, 29]}, "
        "tree: {kind: chain, length: 3}}"
    )
    both = (
        *("sd_chain", "sd_chain_text", "tabed_mt", "sd_tree", "specvlm", "specvlm_uniform", "sage"),
        *("sd_chain_pruned", "lvspec"),
    )
    strong = ("sd_chain_pooled", "tabed_m_tree", "tabed_t_tree", "tabed_mt_tree", "sage_expansion", "random", "typical")
    found |= {f"{name}/strong": Setting(name, "strong") for name in (*both, *strong)}
    for name, guidance in (("specvlm", ", guidance: attention"), ("specvlm_uniform", "")):
        half = (f"method.contexts=[{HALF % guidance}]",)
        found[f"{name}_50/strong"] = Setting(name, "strong", half)
    found |= {f"{name}_sampled/strong": Setting(name, "strong", hot) for name in ("sd_chain", "sd_tree")}
    found["rejection/strong"] = Setting("rejection", "strong", hot)
    found["pruned_drafter_alone/strong"] = Setting("lvspec", "strong", follow_drafter=True)
    found |= {f"{name}/weak": Setting(name, "weak") for name in both}
    return found


def job_of(setting: Setting, dtype: str) -> CaptionJob:
    """Return the caption job of a setting, on the CPU."""
    overrides = [f"method={setting.method}", f"model.target.dtype={dtype}", "model.target.device=cpu"]
    if setting.drafter is not None:
        overrides.append(f"model.drafter={{path: {DRAFTERS[setting.drafter]}, dtype: {dtype}, device: cpu}}")
    return load_job(CaptionJob, CONFIG, (*overrides, *setting.overrides))


def build_cases(num_cases: int) -> list[Case]:
    """Return held-out scenes, each with a phrasing in turn, scored by the attributes that the true caption states."""
    cases = []
    for index, (scene, phrasing) in enumerate(draw_asked("held_out", num_cases, SEED)):
        truth = write_description(scene, phrasing, scene_rng("held_out", SEED, index))
        content = [{"type": "image"}, {"type": "text", "text": PROMPTS[phrasing]}]
        image = np.asarray(render_scene(scene, IMAGE_PX))
        score = functools.partial(count_stated, truth)
        cases.append(Case(f"dense-{index}", ({"role": "user", "content": content},), (image,), score, truth))
    return cases


def run_missing(results: Results, num_cases: int) -> None:
    """Measure the settings that `results` lacks, writing the file after each."""
    chosen, scenarios = settings(), {SCENARIO: build_cases(num_cases)}
    plain: dict[float, Completions] = {}
    for name, setting in chosen.items():
        if name in results["methods"]:
            continue
        if setting.drafter is not None and not (DRAFTERS[setting.drafter] / "training.json").exists():
            progress(f"{name:28s} left out: {DRAFTERS[setting.drafter]} is not trained")
            continue
        gc.collect()  # frees the engines of the setting before, which are in reference cycles
        start_s = time.perf_counter()
        pair = load(job_of(setting, "float32"))
        config = pair.config
        sampling = Sampling(**{**config.sampling.model_dump(), "max_new_tokens": MAX_NEW_TOKENS})
        if sampling.temperature not in plain:
            base = load(job_of(Setting("plain"), "float32"))
            _, plain[sampling.temperature] = run_method(base, base.config.method, scenarios, sampling, None, SEED)
        cells, _ = run_method(
            pair, config.method, scenarios, sampling, plain[sampling.temperature], SEED, setting.follow_drafter
        )
        results["methods"][name] = {
            "verify_mode": "other model" if setting.follow_drafter else config.method.verify_mode,
            "temperature": sampling.temperature,
            "acceptance": "follow" if setting.follow_drafter else config.method.acceptance.kind,
            "drafter": setting.drafter,
            "scenarios": cells,
        }
        save(results)
        length = cells[SCENARIO]["mean_acceptance_length"]
        progress(f"{name:28s} {time.perf_counter() - start_s:6.1f} s  {length:.2f}")


def save(results: Results) -> None:
    """Write the results in the order of the settings, with their claims."""
    measured = results["methods"]
    results["methods"] = {name: measured[name] for name in settings() if name in measured}
    results["drafters"], results["claims"] = trained_drafters(), check_claims(results)
    write_results(RESULTS, results)


def trained_drafters() -> Results:
    """Return layers and measurements of the drafters that are trained, by name."""
    found: Results = {}
    for name, folder in DRAFTERS.items():
        if (folder / "training.json").exists():
            measured = json.loads((folder / "training.json").read_text(encoding="utf-8"))["measured"]
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            figures = {key: measured[key] for key in FIGURES}
            found[name] = {"num_layers": config["text_config"]["num_hidden_layers"], **figures}
    return found


def drafters_table(results: Results) -> str:
    """Render what the drafters learned, and how long it took."""
    rows = [
        [
            name,
            one["num_layers"],
            one["num_taught_rows"],
            one["num_epochs"],
            f"{one['seconds'] / 60:.0f} min",
            percent(one["top1_accuracy"]),
            percent(one["top3_accuracy"]),
            f"{one['mean_acceptance_length']:.2f}",
        ]
        for name, one in results["drafters"].items()
    ]
    titles = (
        "drafter | layers | scenes learned | epochs begun | training | top-1 | top-3 | acceptance length, chain of 4"
    )
    return table(titles, rows)


def speed_requests(pair: Pair, num: int, max_new_tokens: int) -> list[Request]:
    """Return greedy requests about held-out scenes."""
    return requests_of(pair.target, draw_asked("held_out", num, SEED), max_new_tokens)


def methods_table(results: Results) -> str:
    """Render acceptance, cost, quality and equality of every setting."""
    rows = []
    for name, result in results["methods"].items():
        cell = result["scenarios"][SCENARIO]
        rows.append(
            [
                name.split("/")[0],
                result["drafter"] or "",
                f"{result['temperature']:g}",
                result["verify_mode"],
                f"{cell['mean_acceptance_length']:.2f} ± {cell['acceptance_length_se']:.2f}",
                f"{cell['drafted_per_step']:.1f}",
                f"{cell['target_forwards_per_token']:.2f}",
                percent(cell["relaxed_share"]),
                f"{cell['accuracy']:.3f} ± {cell['accuracy_se']:.3f}",
                percent(cell["equal_share"]),
            ]
        )
    titles = (
        "method | drafter | temperature | mode | acceptance length | drafted per step | target forwards per token | "
        "relaxed | attributes right | equal to plain"
    )
    return table(titles, rows)


TABLES = {
    "real_vision_drafters": drafters_table,
    "real_vision_methods": methods_table,
    "real_vision_claims": claims_table,
    "real_vision_speed": speed_table,
}
SPEED_SETTINGS = {
    "plain": Setting("plain"),
    "suffix": Setting("suffix"),
    "sd_chain, strong drafter": Setting("sd_chain", "strong"),
    "sd_chain, weak drafter": Setting("sd_chain", "weak"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("real_vision", __doc__)
    parser.add_argument("--speed", action="store_true", help="measure speed; the file must exist")
    parser.add_argument("--cases", type=int, default=NUM_CASES, help=f"held-out scenes ({NUM_CASES})")
    parser.add_argument("--threads", type=int, default=len(cores()), help="(all cores)")
    options = parser.parse_args(arguments)
    if not (FOLDER / "target").exists():
        progress(f"refused: {FOLDER / 'target'} does not exist; run `python -m zoo.real_vision` first")
        return 2
    torch.set_num_threads(options.threads)
    about = {"machine": machine(), "torch": torch.__version__}
    results: Results = read_results(RESULTS) if RESULTS.exists() else {}
    if options.speed:
        pairs = {name: load(job_of(one, "bfloat16")) for name, one in SPEED_SETTINGS.items()}
        results |= {
            "speed_setting": about | {"threads": options.threads},
            "speed": measure_speed(pairs, speed_requests),
        }
        write_results(RESULTS, results)
        print(speed_table(results))
        return 0
    results = {"setting": about, "num_cases": options.cases, "seed": SEED, "methods": {}, **results}
    if results["num_cases"] != options.cases:
        progress(f"refused: {RESULTS} has {results['num_cases']} cases; remove it to measure {options.cases}")
        return 2
    run_missing(results, options.cases)
    print(methods_table(results), claims_table(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
