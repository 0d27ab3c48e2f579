"""Measures equality and acceptance of lossless methods on a pretrained model and real text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from actors.loading.method import build_method
from actors.loading.pair import Pair, load
from benchmarks.harness.engines import acceptance_of, encode, run_requests
from benchmarks.harness.markdown import Results
from benchmarks.harness.process import Work
from benchmarks.harness.results import progress
from benchmarks.harness.verdict import first_difference, judge
from benchmarks.peers.work import reference_of
from benchmarks.tables.real import equal_rows
from configs.load import load_job
from configs.schema import CaptionJobConfig
from decoding import Completion, Engine, Request, Sampling
from zoo.real.drafters import digest

CONFIG = "configs/jobs/real_text.yaml"
HELD_OUT = Path("out/real/source/held_out.parquet")
SOME_LAYERS = ", ".join(str(layer) for layer in (*range(6), *range(7, 24, 3), *range(24, 30)))
METHODS: dict[str, tuple[str, ...]] = {
    "plain": ("method=plain",),
    "lookup": ("method=lookup",),
    "suffix": ("method=suffix",),
    "jacobi": ("method=jacobi",),
    "layer_skip": (
        f"method={{drafter: {{kind: layer_skip, layers: [{SOME_LAYERS}]}}, tree: {{kind: chain, length: 3}}}}",
    ),
}
"""Name → the method, as overrides of the job file."""
DRAFTER, EAGLE = Path("out/real/drafter"), Path("out/real/eagle")
"""The shipped drafter and head, which `python -m zoo.real` builds."""
DRAFTED = {"sd_chain": DRAFTER, "sd_tree": DRAFTER, "rejection": DRAFTER, "eagle2_25": EAGLE}
"""Method → the shipped checkpoint that drafts."""
HEADS_FOLDER = Path("out/real/heads")
HEADS = {
    "eagle3_25": "{kind: eagle3, num_draft_steps: 2, vocabulary: {path: out/real/vocabulary.json, size: 4096}}",
    "medusa": "{kind: medusa, num_heads: 4}",
    "block_8": "{kind: block, block_size: 8}",
}
"""Method, which is also the folder of its head → `head` of the training job."""
SAMPLED_ONLY = ("rejection",)
NUM_PROMPTS, MAX_NEW_TOKENS, SLOTS, CONTEXT_TOKENS = 200, 32, 16, 512
TEMPERATURES = (0.0, 1.0)
SEED = 0


def drafter_of(name: str) -> Path | None:
    """Return the checkpoint that drafts for a method; None if none does."""
    return DRAFTED.get(name) or (HEADS_FOLDER / name if name in HEADS else None)


def drafter_sha256(name: str) -> str:
    """Return the SHA-256 of the weights of a method's checkpoint, which identifies its results; "" without one."""
    folder = drafter_of(name)
    return " ".join(digest(path) for path in sorted(folder.glob("*.safetensors"))) if folder else ""


def job_of(name: str, dtype: str, device: str = "cpu") -> CaptionJobConfig:
    """Return the caption job of a method."""
    overrides = [*METHODS.get(name, (f"method={name}",))]
    overrides += [f"model.target.dtype={dtype}", f"model.target.device={device}"]
    if (path := drafter_of(name)) is not None:
        overrides.append(f"model.drafter={{path: {path}, dtype: {dtype}, device: {device}}}")
    return load_job(CaptionJobConfig, CONFIG, tuple(overrides))


def read_prompts(pair: Pair, limit: int) -> list[str]:
    """Return rendered prompts of the first held-out rows."""
    rows = pq.read_table(HELD_OUT).slice(0, limit).to_pylist()
    prompt = pair.config.prompt
    assert prompt is not None
    assert prompt.text is not None
    texts = [prompt.text.format(**row) for row in rows]
    return [pair.render([{"role": "user", "content": [{"type": "text", "text": text}]}]) for text in texts]


def requests_of(prompts: Sequence[str], sampling: Sampling) -> list[Request]:
    """Return one request for each rendered prompt."""
    return [Request(str(number), prompt, sampling=sampling, seed=SEED) for number, prompt in enumerate(prompts)]


def decode(pair: Pair, requests: Sequence[Request], slots: int) -> tuple[list[Completion], float]:
    """Decode all requests with one engine; return completions and seconds."""
    config = pair.config
    engine = Engine(
        pair.target, build_method(config.method, pair.drafter, pair.target), slots, config.pool.max_context_tokens
    )
    start_s = time.perf_counter()
    done = run_requests(engine, requests)
    return done, time.perf_counter() - start_s


def make_reference(prompts: Sequence[str], pair: Pair, scratch: Path) -> list[dict[str, Any]]:
    """Return the greedy tokens of transformers' `generate` in float32, with the gaps of the two best logits."""
    ids = encode(pair.target.front_end, prompts)
    work = Work(
        target=str(pair.config.model.target.path),
        drafter="",
        dtype="float32",
        threads=torch.get_num_threads(),
        gamma=0,
        max_batch=SLOTS,
        max_context_tokens=CONTEXT_TOKENS,
        max_new_tokens=MAX_NEW_TOKENS,
        ignore_eos=False,
        prompt_texts=list(prompts),
        prompt_ids=ids,
    )
    scratch.mkdir(parents=True, exist_ok=True)
    return reference_of(work, scratch)


def measure_equality(missing: Sequence[tuple[str, float]], num_prompts: int, scratch: Path) -> Iterator[Results]:
    """Run methods at temperatures in float32; yield a row for each.

    Greedy outputs are compared with `generate`, sampled ones with plain sampling under the same noise. Rejection
    sampling (`SAMPLED_ONLY`) has other tokens, which are not compared.
    """
    plain = load(job_of("plain", "float32"))
    prompts = read_prompts(plain, num_prompts)

    @cache
    def reference() -> list[dict[str, Any]]:
        return make_reference(prompts, plain, scratch)

    @cache
    def sampled() -> list[list[int]]:
        done, _ = decode(plain, requests_of(prompts, Sampling(MAX_NEW_TOKENS, temperature=1.0)), SLOTS)
        return [list(completion.token_ids) for completion in done]

    for name, temperature in missing:
        pair = load(job_of(name, "float32"))
        done, spent_s = decode(pair, requests_of(prompts, Sampling(MAX_NEW_TOKENS, temperature)), SLOTS)
        outputs = [list(completion.token_ids) for completion in done]
        row: Results = {"method": name, "temperature": temperature, "num_prompts": len(prompts)}
        row["drafter_sha256"] = drafter_sha256(name)
        if temperature == 0.0:
            row |= asdict(judge(outputs, reference(), "float32"))
        elif name not in SAMPLED_ONLY:
            differing = [first_difference(*both) for both in zip(outputs, sampled(), strict=True)]
            row |= {"num_sequences": len(outputs), "num_equal": sum(index is None for index in differing)}
        num_tokens = sum(map(len, outputs))
        row |= acceptance_of(done)
        row |= {
            "num_tokens": num_tokens,
            "target_forwards_per_token": sum(completion.telemetry.target_forwards for completion in done) / num_tokens,
            "drafter_forwards_per_token": sum(completion.telemetry.drafter_forwards for completion in done)
            / num_tokens,
        }
        summary = f"{equal_rows(row)['equal']} equal, length {row['mean_acceptance_length']:.2f}"
        progress(f"{name:17s} T = {temperature:g}: {summary}, {spent_s:.0f} s")
        yield row


def settings() -> list[tuple[str, float]]:
    """Return all methods and temperatures that are measured with what ships."""
    return [
        (name, temperature)
        for name in (*METHODS, *DRAFTED)
        for temperature in TEMPERATURES
        if temperature or name not in SAMPLED_ONLY
    ]


def head_settings() -> list[tuple[str, float]]:
    """Return the trained heads and temperatures that are measured."""
    return [(name, temperature) for name in HEADS for temperature in TEMPERATURES]


def text_requests(pair: Pair, num: int, max_new_tokens: int) -> list[Request]:
    """Return greedy requests of the first held-out prompts."""
    return requests_of(read_prompts(pair, num), Sampling(max_new_tokens=max_new_tokens))
