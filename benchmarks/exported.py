"""Trains an EAGLE-3 head for the shipped text target, and decodes with it in this engine and in vLLM.

    python -m benchmarks.exported                 # writes results/exported.json; ten minutes on two cores

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

from actors.loading.pair import load_target
from benchmarks.harness.engines import run_requests
from benchmarks.harness.markdown import Results, table
from benchmarks.harness.process import Outcome, Peer, Work
from benchmarks.harness.results import command_line, cores, machine, progress, results_file, write_results
from benchmarks.peers.environment import base_variables, make_environment, preloads, python_of, vllm_variables
from benchmarks.peers.rounds import ENGINE, VLLM
from benchmarks.peers.work import reference_of
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


def measure(scratch: Path) -> Results:
    threads = len(cores())
    source, head = scratch / "answers", scratch / "head"
    if not (source / "answers.jsonl").exists():
        write_answers(source)
    trained = train_head(source, head)
    texts = held_out_prompts(NUM_PROMPTS, 0)
    ids = load_target(Checkpoint(path=str(TARGET), dtype="float32", device="cpu"), "target").front_end
    prompt_ids = [ids.encode(text, ())["input_ids"][0].tolist() for text in texts]
    options = (str(TARGET), str(head), "float32", threads, GAMMA, BATCH, CONTEXT_TOKENS, MAX_NEW_TOKENS, False)
    work = Work(*options, texts, prompt_ids)
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
        "num_taught": NUM_TAUGHT,
        "gamma": GAMMA,
        "training": {**TRAINING, **trained},
        "versions": {"draftfleet": our_versions, "vLLM": their_versions},
        "rows": [row_of("draftfleet", ours, reference), row_of("vLLM", theirs, reference)],
    }


def exported_table(results: Results) -> str:
    rows = [
        (
            row["engine"],
            f"{row['acceptance_length']:.3f}",
            row["num_steps"],
            f"{row['num_equal']} of {row['num_prompts']}",
        )
        for row in results["rows"]
    ]
    return table("engine | acceptance length | steps | outputs equal to the target's", rows)


TABLES = {"exported_heads": exported_table}


def main(arguments: list[str] | None = None) -> int:
    parser: argparse.ArgumentParser = command_line("exported", __doc__)
    parser.add_argument(
        "--scratch", type=Path, default=Path("out/exported"), help="answers, head and vLLM's environment"
    )
    options = parser.parse_args(arguments)
    options.scratch.mkdir(parents=True, exist_ok=True)
    results = measure(options.scratch)
    write_results(RESULTS, results)
    print(exported_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
