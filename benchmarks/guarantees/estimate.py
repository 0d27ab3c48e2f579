"""Compares the verdict of `--estimate` with whole jobs, on three workloads with an inflated text pair.

    python -m benchmarks.guarantees.estimate     # writes results/estimate.json; about half an hour

In the first workload a chain of drafts is faster than plain decoding. In the second its drafter is costly and poor, so
that plain decoding is faster. In the third prompts are long and answers short, so that decoding takes a small part of
the time. For each, a pilot gives its verdict. Then the whole job runs with both methods in turns, over rows of which
the pilot decoded a part. Times are those in which the engine had rows.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils.logging import disable_progress_bar

from benchmarks.harness.markdown import Results
from benchmarks.harness.results import command_line, machine, progress, results_file
from benchmarks.harness.verdict import turns
from benchmarks.inflate.folders import inflate_folder
from benchmarks.inflate.shapes import Shape, drafter_shape
from benchmarks.tables.parts import finish
from configs.load import validate
from configs.pool import JobSectionConfig
from configs.schema import CaptionJobConfig
from jobs import caption
from pipeline.cluster import ray_session
from pipeline.pilot import estimate
from pipeline.pilot.run import run_pilot
from pipeline.reports.result_tables import list_tables, read_tables
from pipeline.run.plan import make_plan
from pipeline.storage.output_dir import DATA, OutputDir
from zoo.pair import CHECKPOINTS
from zoo.text import held_out_questions
from zoo.world import listing

RESULTS = results_file("estimate")
SHAPE = Shape(1024, 4, 16, 16, 2816)
CHECKED = {"num_prompts": 1, "max_new_tokens": 8}
"""Prompts and tokens on which an inflated checkpoint is compared with its source."""
NOISE = 3.0
"""Noise on the head of the poor drafter, in standard deviations of its weights."""
SLOTS, MAX_ROWS, NUM_ROWS, NUM_REPEATS = 8, 512, 192, 3
"""Slots, rows of the source, rows of a whole job, and jobs per method."""
CHAIN = {"name": "chain", "drafter": {"kind": "model"}, "tree": {"kind": "chain", "length": 5}}
PLAIN = {"name": "plain", "drafter": {"kind": "none"}}


@dataclass(frozen=True)
class Workload:
    """The drafter, by its share of the target's weights; questions per prompt, tokens per answer, and rows of the
    pilot: short answers need more."""

    ratio: float
    is_poor: bool
    num_questions: int
    num_tokens: int
    num_pilot_rows: int


WORKLOADS = {
    "good drafter": Workload(0.05, False, 1, 24, 400),
    "poor drafter": Workload(0.2, True, 1, 24, 400),
    "long prompts, short answers": Workload(0.05, False, 6, 8, 512),
}


def write_drafter(folder: Path, workload: Workload) -> Path:
    """Write the inflated drafter of a workload, and return its folder."""
    source = folder / "source_drafter"
    shutil.copytree(CHECKPOINTS / "text_drafter", source)
    if workload.is_poor:
        tensors = load_file(source / "model.safetensors")
        head = tensors["lm_head.weight"].float()
        noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
        tensors["lm_head.weight"] = (head + NOISE * head.std() * noise).to(tensors["lm_head.weight"].dtype)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
    inflate_folder(source, folder / "drafter", drafter_shape(SHAPE, workload.ratio), "float32", **CHECKED)
    return folder / "drafter"


def write_prompts(path: Path, num_questions: int) -> None:
    """Write one prompt of `num_questions` questions per line."""
    asked = [listing.write_prompt(*question) for question in held_out_questions(MAX_ROWS, 7)]
    prompts = [" ".join(asked[(row + index) % MAX_ROWS] for index in range(num_questions)) for row in range(MAX_ROWS)]
    path.write_text("\n".join(prompts) + "\n", encoding="utf-8")


def job_of(workload: Workload, method: dict[str, Any], folder: Path, target: Path, output: Path) -> CaptionJobConfig:
    drafter = {"drafter": {"path": str(folder / "drafter"), "dtype": "float32", "device": "cpu"}}
    data = {
        "source": {"kind": "text", "path": str(folder / "prompts.txt"), "span_max_rows": 32},
        "prompt": "{text}",
        "model": {
            "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
            **(drafter if method is CHAIN else {}),
        },
        "method": method,
        "sampling": {"max_new_tokens": workload.num_tokens, "ignore_eos": True},
        "pool": {"slots": SLOTS, "max_context_tokens": 1024, "compile": "never", "max_size": 1, "torch_threads": 1},
        "job": {"progress": False},
        "sink": {"path": str(output)},
    }
    return validate(CaptionJobConfig, data, "benchmarks.guarantees.estimate")


def run_whole(config: CaptionJobConfig) -> tuple[float, dict[str, str]]:
    """Run a whole job; return the engine's seconds with rows, per row, and the texts by id."""
    done = caption.run(make_plan(config, limit=NUM_ROWS))
    output, texts = OutputDir(config.sink.path), dict[str, str]()
    for part in read_tables(output, list_tables(output, (DATA,)), ["sample_id", "generated_text"]):
        texts |= {row["sample_id"]: row["generated_text"] for row in part.to_pylist()}
    return (done.waits.total_s - done.waits.idle_s) / done.num_samples, texts


def measure(workload: Workload, folder: Path, target: Path) -> Results:
    """Take the verdict of a pilot, run the job with both methods in turns, and compare."""
    write_drafter(folder, workload)
    write_prompts(folder / "prompts.txt", workload.num_questions)
    plan = make_plan(job_of(workload, CHAIN, folder, target, folder / "pilot"))
    rows, verdict = run_pilot(plan, caption.results, estimate.draw(plan.datasource, workload.num_pilot_rows))
    if verdict is None:
        raise RuntimeError("the pilot has no verdict")
    chain = verdict.result_of("chain")
    if chain is None or chain.speedup is None:
        raise RuntimeError("the pilot did not measure the chain")
    progress("\n".join(verdict.lines()))
    methods = {"plain": PLAIN, "chain": CHAIN}
    row_s: dict[str, list[float]] = {name: [] for name in methods}
    texts: dict[str, str] = {}
    num_equal = 0
    for number, order in enumerate(turns(list(methods), NUM_REPEATS)):
        for name in order:
            output = folder / f"{name}-{number}"
            seconds, run_texts = run_whole(job_of(workload, methods[name], folder, target, output))
            row_s[name].append(seconds)
            texts = texts or run_texts
            num_equal += len(run_texts.items() & texts.items())
    speedups = [plain / other for plain, other in zip(row_s["plain"], row_s["chain"], strict=True)]
    return {
        "verdict": verdict.to_json(),
        "num_pilot_rows": rows.num_rows,
        "row_s": row_s,
        "speedups": speedups,
        "num_equal": num_equal,
        "num_texts": len(methods) * NUM_REPEATS * NUM_ROWS,
    }


def main(arguments: list[str] | None = None) -> int:
    command_line("guarantees.estimate", __doc__).parse_args(arguments)
    disable_progress_bar()
    results: Results = {"machine": machine(), "torch": torch.__version__, "num_rows": NUM_ROWS, "slots": SLOTS}
    results["workloads"] = {}
    with tempfile.TemporaryDirectory() as temporary, ray_session.session(JobSectionConfig()):
        target = Path(temporary) / "target"
        inflate_folder(CHECKPOINTS / "text_target", target, SHAPE, "float32", **CHECKED)
        for name, workload in WORKLOADS.items():
            folder = Path(temporary) / name.replace(" ", "-").replace(",", "")
            folder.mkdir()
            results["workloads"][name] = measure(workload, folder, target)
            progress(name, [round(value, 3) for value in results["workloads"][name]["speedups"]])
    return finish(RESULTS, results)


if __name__ == "__main__":
    sys.exit(main())
