"""Tests losslessness on the shipped pair: trained models and real prompts with zero to three images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from transformers import AutoProcessor

from actors.loading.pair import Pair, load
from configs.load import load_job
from configs.schema import CaptionJobConfig
from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.contracts import TreePolicy
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.trees import Chain, StaticTree, branching_paths
from models.target import Target
from tests.conformance.checks import check_telemetry, run
from tests.covering import tiers
from zoo.pair import CHECKPOINTS
from zoo.quality import ask, load_captioner, other_questions
from zoo.world import sample_scenes

TREES: dict[str, Callable[[], TreePolicy]] = {
    "chain": lambda: Chain(5),
    "static": lambda: StaticTree(branching_paths([3, 2, 1])),
}


@cache
def pair() -> Pair:
    return load(load_job(CaptionJobConfig, "configs/jobs/demo_caption.yaml", ("model.target.dtype=float32",)))


@cache
def requests() -> tuple[Request, ...]:
    """Eleven prompts of four kinds with different limits."""
    singles = [ask(prompt, [image], "") for _, image, _, prompt in sample_scenes("test", 5, 21)]
    others = other_questions(2, 77)
    asked = [*singles, *others["change"], *others["second"], *others["text"]]
    return tuple(
        Request(
            f"q{i}",
            pair().render(question.messages),
            tuple(np.asarray(image.convert("RGB")) for image in question.images),
            Sampling(max_new_tokens=20 + 7 * i),
            seed=4,
        )
        for i, question in enumerate(asked)
    )


@cache
def generated() -> dict[str, tuple[int, ...]]:
    """Output of transformers' `generate` for the target alone, one prompt at a time."""
    processor = AutoProcessor.from_pretrained(CHECKPOINTS / "caption_target")
    model = load_captioner(CHECKPOINTS, "target")
    results = {}
    for request in requests():
        pictures: dict[str, Any] = {"images": [list(request.images)]} if request.images else {}
        inputs = processor(text=[request.prompt], return_tensors="pt", **pictures)
        out = model.generate(**inputs, max_new_tokens=request.sampling.max_new_tokens, do_sample=False)
        results[request.sample_id] = tuple(out[0, inputs["input_ids"].shape[1] :].tolist())
    return results


def engine(tree: str | None, slots: int) -> Engine:
    drafter_model = pair().drafter
    assert isinstance(drafter_model, Target)
    if tree is None:
        return Engine(pair().target, Method(NoDrafter(), Chain(1), Exact()), slots, 512)
    drafter = ModelDrafter(drafter_model, [Full()], pair().target.vocab_size)
    return Engine(pair().target, Method(drafter, TREES[tree](), Exact()), slots, 512)


@tiers("tree, slots", list(TREES), [1, 4, 9], strength=1)
def test_greedy_output_equals_generate(tree: str, slots: int) -> None:
    done = run(engine(tree, slots), requests())
    assert {key: c.token_ids for key, c in done.items()} == generated()
    for completion in done.values():
        check_telemetry(completion)
    mean = sum(c.telemetry.mean_acceptance_length for c in done.values()) / len(done)
    assert mean > 2.0, "the shipped drafter really speculates"


def test_sampled_output_equals_plain_sampling() -> None:
    sampling = Sampling(max_new_tokens=40, temperature=0.9, top_p=0.95, repetition_penalty=1.05)
    wanted = [replace(request, sampling=sampling) for request in requests()]
    plain = run(engine(None, 4), wanted)
    for tree in TREES:
        done = run(engine(tree, 5), wanted[::-1])
        assert {key: c.token_ids for key, c in done.items()} == {key: c.token_ids for key, c in plain.items()}
    greedy = generated()
    assert any(plain[r.sample_id].token_ids != greedy[r.sample_id][:40] for r in wanted), "sampling changed nothing"
