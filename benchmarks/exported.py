"""Trains an EAGLE-3 head for the shipped text target, and decodes with it in this engine and in vLLM.

    python -m benchmarks.exported                 # writes results/exported.json; ten minutes on two cores
    python -m benchmarks.exported --real          # adds the pretrained model, with a head of benchmarks.learning

The head learns the target's own answers to prompts of the training split with `jobs.train_drafter`, which writes the
format of speculators. Both engines then draft chains of equal length for held-out prompts, in float32; their outputs
are compared with transformers' `generate`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.loading.pair import load, load_target
from benchmarks.harness.engines import run_requests
from benchmarks.harness.markdown import Results, table
from benchmarks.harness.process import Outcome, Peer, Work
from benchmarks.harness.results import command_line, cores, machine, progress, read_results, results_file, write_results
from benchmarks.peers.environment import base_variables, make_environment, preloads, python_of, vllm_variables
from benchmarks.peers.rounds import ENGINE, VLLM
from benchmarks.peers.work import reference_of
from benchmarks.real.text import job_of, read_prompts
from configs.schema import Checkpoint
from configs.training import TrainDrafterJob
from decoding import Engine, Request, Sampling
from decoding.acceptance import Exact
from decoding.contracts import Method
from decoding.drafters import NoDrafter
from decoding.trees import Chain
from jobs import train_drafter
from zoo.pair import CHECKPOINTS
from zoo.text.samples import held_out_prompts, held_out_questions
from zoo.world import listing

RESULTS = results_file("exported")
TARGET = CHECKPOINTS / "text_target"
NUM_TAUGHT, NUM_PROMPTS, BATCH = 1000, 96, 8
REAL_HEAD = Path("out/real/heads/1")
ANSWER_TOKENS, MAX_NEW_TOKENS, CONTEXT_TOKENS, GAMMA = 224, 64, 320, 5
TRAINING = {
    "num_steps": 150,
    "batch_rows": 16,
    "learning_rate": 1.0e-3,
    "warmup_steps": 25,
    "schedule": "cosine",
    "held_out_share": 0.03,
    "measure_every_steps": 75,
}


def write_answers(folder: Path) -> None:
    """Write prompts of the training split with the target's greedy answers as JSON lines."""
    target = load_target(Checkpoint(path=str(TARGET), dtype="float32", device="cpu"), "target")
    asked = [listing.write_prompt(*one) for one in held_out_questions(NUM_TAUGHT, 1, "train")]
    sampling = Sampling(max_new_tokens=ANSWER_TOKENS)
    requests = []
    for number, prompt in enumerate(asked):
        rendered = target.front_end.render([{"role": "user", "content": [{"type": "text", "text": prompt}]}])
        requests.append(Request(str(number), rendered, sampling=sampling))
    engine = Engine(target, Method(NoDrafter(), Chain(1), Exact()), 32, CONTEXT_TOKENS)
    done = run_requests(engine, requests)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"id": one.sample_id, "prompt": prompt, "answer": one.text.strip()}
        for prompt, one in zip(asked, done, strict=True)
        if one.finish_reason == "stop"
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_head(source: Path, output: Path) -> dict[str, Any]:
    """Train and write the head, unless the folder holds it; return its measurements. An interrupted run is resumed."""
    finished = output / "training.json"
    if finished.exists():
        found: dict[str, Any] = json.loads(finished.read_text())["measured"]
        return found
    job = TrainDrafterJob.model_validate(
        {
            "source": {"kind": "jsonl", "path": str(source), "id_column": "id"},
            "prompt": "{prompt}",
            "answer_column": "answer",
            "target": {"path": str(TARGET), "dtype": "float32", "device": "cpu"},
            "head": {"kind": "eagle3"},
            "training": TRAINING,
            "acceptance": {"num_rows": 32, "max_new_tokens": MAX_NEW_TOKENS},
            "output": {"path": str(output)},
        }
    )
    return train_drafter.run(job)


def decode(name: str, module: str, work_file: Path, python: str, variables: dict[str, str]) -> tuple[Outcome, Any]:
    """Decode all prompts in a process of one engine; return the outcome and the versions of its libraries."""
    command = [python, "-m", module, str(work_file), "eagle3"]
    with Peer(name, command, variables, work_file.parent / "logs" / f"{name}.log") as peer:
        peer.wait_ready()
        return peer.ask("run", BATCH, NUM_PROMPTS), peer.versions


def row_of(name: str, outcome: Outcome, reference: Sequence[Results]) -> Results:
    pairs = zip(outcome.outputs, reference, strict=True)
    return {
        "engine": name,
        "acceptance_length": 1 + outcome.num_accepted / outcome.num_steps,
        "num_steps": outcome.num_steps,
        "num_equal": sum(output == expected["tokens"] for output, expected in pairs),
        "num_prompts": len(reference),
    }


def compare(target: str, head: Path, texts: Sequence[str], scratch: Path) -> Results:
    """Decode rendered prompts with a head in both engines; return a row per engine and the versions of libraries."""
    threads = len(cores())
    front_end = load_target(Checkpoint(path=target, dtype="float32", device="cpu"), "target").front_end
    prompt_ids = [front_end.encode(text, ())["input_ids"][0].tolist() for text in texts]
    context_tokens = max(map(len, prompt_ids)) + MAX_NEW_TOKENS + GAMMA + 1
    options = (target, str(head), "float32", threads, GAMMA, BATCH, context_tokens, MAX_NEW_TOKENS, False)
    work = Work(*options, list(texts), prompt_ids)
    work_file = scratch / "work.json"
    work.write(work_file)
    reference = reference_of(work, scratch)
    variables = base_variables(threads, scratch, os.environ)
    ours, our_versions = decode("engine_eagle3", ENGINE, work_file, sys.executable, variables)
    make_environment(scratch / "vllm")
    own = vllm_variables(cores(), scratch)
    variables |= {**own, "LD_PRELOAD": preloads(scratch / "vllm")}
    theirs, their_versions = decode("vllm_eagle3", VLLM, work_file, str(python_of(scratch / "vllm")), variables)
    progress(f"steps: {ours.num_steps} and {theirs.num_steps}")
    return {
        "machine": machine(),
        "gamma": GAMMA,
        "versions": {"draftfleet": our_versions, "vLLM": their_versions},
        "rows": [row_of("draftfleet", ours, reference), row_of("vLLM", theirs, reference)],
    }


def measure(scratch: Path) -> Results:
    """Train a head for the shipped text target, and compare both engines on held-out prompts."""
    source, head = scratch / "answers", scratch / "head"
    if not (source / "answers.jsonl").exists():
        write_answers(source)
    trained = train_head(source, head)
    found = compare(str(TARGET), head, held_out_prompts(NUM_PROMPTS, 0), scratch)
    return {"num_taught": NUM_TAUGHT, "training": {**TRAINING, **trained}, **found}


def measure_real(scratch: Path) -> Results:
    """Compare both engines on the pretrained model, with the head that benchmarks.learning trained on all answers."""
    texts = read_prompts(load(job_of("plain", "float32")), NUM_PROMPTS)
    return compare("out/real/target", REAL_HEAD, texts, scratch)


def exported_table(results: Results) -> str:
    targets = {"shipped text target": results, "SmolLM2-135M-Instruct": results.get("real", {"rows": []})}
    rows = [
        (
            name,
            row["engine"],
            f"{row['acceptance_length']:.3f}",
            row["num_steps"],
            f"{row['num_equal']} of {row['num_prompts']}",
        )
        for name, found in targets.items()
        for row in found["rows"]
    ]
    return table("target | engine | acceptance length | steps | outputs equal to the target's", rows)


TABLES = {"exported_heads": exported_table}


def main(arguments: list[str] | None = None) -> int:
    parser: argparse.ArgumentParser = command_line("exported", __doc__)
    parser.add_argument(
        "--scratch", type=Path, default=Path("out/exported"), help="answers, head and vLLM's environment"
    )
    parser.add_argument("--real", action="store_true", help="measure on the pretrained model; the file has the rest")
    options = parser.parse_args(arguments)
    if options.real and not (REAL_HEAD / "config.json").exists():
        progress(f"refused: {REAL_HEAD} holds no head; run `python -m benchmarks.learning` first")
        return 2
    options.scratch.mkdir(parents=True, exist_ok=True)
    if options.real:
        results = {**read_results(RESULTS), "real": measure_real(options.scratch)}
    else:
        results = measure(options.scratch)
    write_results(RESULTS, results)
    print(exported_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
