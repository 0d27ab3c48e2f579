"""Checks of shared prompts: outputs and KV caches equal those without sharing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decoding import Engine, Request, Sampling
from decoding.contracts import PrefillOutput
from decoding.drafters import ModelDrafter
from models.kv import prefill_batching
from models.kv.lanes import LaneModel, SlotBatch
from models.kv.prefill import PromptReader
from tests import toys
from tests.conformance import checks, images
from tests.conformance.methods import METHODS

NUM_PROMPTS = 3
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.95)
LIVELY = Sampling(temperature=1.5, top_k=5, ignore_eos=True)
"""First tokens differ between samples of one prompt."""


def equal_prompts(family: str, count: int = 9, sampling: Sampling | None = None) -> list[Request]:
    """Requests of three prompts in turns, each with separate arrays, seed and limit."""
    base = sampling or Sampling()
    made = []
    for i in range(count):
        text, pictures = toys.prompt(family, i % NUM_PROMPTS)
        text, videos = toys.with_video(family, text, 1) if i % NUM_PROMPTS == 1 else (text, ())
        own = tuple(picture.copy() for picture in pictures)
        limits = replace(base, max_new_tokens=4 + (5 * i) % 13)
        made.append(Request(f"sample-{i}", text, own, limits, seed=i, videos=videos))
    return made


class Read:
    """Counts prefills: `whole` prompts or stems, continuations `behind` stems, and their positions (`columns`)."""

    def __init__(self, patch: pytest.MonkeyPatch, of: LaneModel) -> None:
        self.whole = self.behind = self.columns = 0
        run_whole, run_behind = PromptReader._run_whole, PromptReader._run_behind

        def whole(reader: PromptReader, rows: Tensor, prefixes: Any) -> Any:
            if reader._cache is of.cache:
                self.whole += len(prefixes)
                self.columns += sum(prefix.length for prefix in prefixes)
            return run_whole(reader, rows, prefixes)

        def behind(reader: PromptReader, rows: Tensor, rests: Any, starts: Any) -> Any:
            if reader._cache is of.cache:
                self.behind += len(rests)
                self.columns += sum(rest.length for rest in rests)
            return run_behind(reader, rows, rests, starts)

        patch.setattr(PromptReader, "_run_whole", whole)
        patch.setattr(PromptReader, "_run_behind", behind)


def check_equal_prompts(method: str, family: str, slots: int, sampling: Sampling | None = None) -> int:
    """Output equals the oracle's with shared prompts; returns the number of prefilled prompts."""
    target = toys.target(family)
    engine = Engine(target, METHODS[method][0](family), slots, 160)
    wanted = equal_prompts(family, sampling=sampling)
    with pytest.MonkeyPatch.context() as patch:
        read = Read(patch, engine._lanes)
        done = checks.run(engine, wanted)
    oracle = checks.generated if sampling is None else checks.referenced
    for request in wanted:
        result = done[request.sample_id]
        assert result.token_ids == oracle(family, request, target.eos_ids), (method, family, request.sample_id)
        checks.check_telemetry(result)
        prefix = target.encode(request.prompt, request.images, request.videos)
        assert result.num_input_tokens == prefix.length
    assert read.behind == 0
    return read.whole


def check_memory(family: str, method: str = "sd-chain", wanted: Sequence[Request] = ()) -> None:
    """After every step, each row's KV cache equals a prefill of its tokens, for target and drafter."""
    target = toys.target(family)
    made = METHODS[method][0](family)
    engine = Engine(target, made, 4, 160)
    for request in wanted or equal_prompts(family):
        engine.submit(request)
    num_compared = 0
    while engine.has_work:
        engine.step()
        for slot, progress in enumerate(engine._slots.progress):
            if progress is None:
                continue
            request = progress.request
            prefix = target.encode(request.prompt, request.images, request.videos)
            checks.compare_row(engine._lanes, engine._lanes.rows.first_of(slot), prefix, progress.token_ids[:-1])
            if isinstance(made.drafter, ModelDrafter):
                guess = made.drafter
                held = len(progress.token_ids) - int(guess._num_pending[slot])
                own = guess.prefixes(request, PrefillOutput(prefix))[0]
                checks.compare_row(guess.lanes, guess.lanes.rows.first_of(slot), own, progress.token_ids[:held])
            num_compared += 1
    assert num_compared > 10


def check_images(method: str, kind: str, mode: str = "sampled-guided") -> int:
    """Images of one condition with several seeds equal those generated one at a time; returns prefilled prompts."""
    sampling = images.MODES[mode]
    base = images.images.requests(kind, 2, sampling)
    wanted = [replace(base[i % 2], sample_id=f"image-{i}", seed=i, replica=i) for i in range(6)]
    outputs = []
    for slots in (1, 6):
        target = images.images.target(kind, guided=sampling.guidance_scale > 1.0)
        engine = Engine(target, images.METHODS[method](target, kind), slots, 64)
        with pytest.MonkeyPatch.context() as patch:
            read = Read(patch, engine._lanes)
            outputs.append({key: completion.token_ids for key, completion in checks.run(engine, wanted).items()})
    assert outputs[0] == outputs[1], (method, kind)
    assert len(set(outputs[0].values())) == 6 or sampling.temperature == 0
    return read.whole


def check_pictures_alone(family: str) -> None:
    """Samples with equal texts and different images of one size are different."""
    text, pictures = toys.prompt(family, 2)
    shapes = [picture.shape for picture in pictures]
    assert shapes, "the prompt has pictures"
    target = toys.target(family)
    engine = Engine(target, METHODS["plain"][0](family), 3, 160)
    wanted = []
    for i in range(3):
        generator = np.random.default_rng(i)
        shown = tuple(generator.integers(0, 256, shape, dtype=np.uint8) for shape in shapes)
        wanted.append(Request(f"sample-{i}", text, shown, Sampling(max_new_tokens=8), seed=i))
    done = checks.run(engine, wanted)
    results = []
    for request in wanted:
        inputs = toys.front_end(family).encode(request.prompt, request.images)
        out: Any = toys.oracle(family).generate(  # type: ignore[operator]
            **inputs, max_new_tokens=8, do_sample=False, eos_token_id=sorted(target.eos_ids)
        )
        results.append(tuple(out[0, inputs["input_ids"].shape[1] :].tolist()))
    assert [done[request.sample_id].token_ids for request in wanted] == results
    assert len(set(results)) > 1, "the pictures make a difference"


@contextmanager
def small_savings() -> Iterator[None]:
    """Allows sharing of prefixes as short as the toys' prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_batching, "MIN_SAVING", 1)
        yield


def questions(family: str, sampling: Sampling | None = None, count: int = 9) -> list[Request]:
    """Questions of different lengths about two samples in turns, the second with a video; one sample for texts."""
    base = sampling or Sampling()
    num_samples = 2 if toys.takes_images(family) else 1
    made = []
    for i in range(count):
        sample = i % num_samples
        text, pictures = toys.prompt(family, sample)
        text, videos = toys.with_video(family, text, sample) if sample % 2 else (text, ())
        text += "".join(f" w{9 + (7 * i + word) % 40}" for word in range(1 + i % 4))
        limits = replace(base, max_new_tokens=4 + (5 * i) % 13)
        own = tuple(picture.copy() for picture in pictures)
        made.append(Request(f"question-{i}", text, own, limits, seed=i, videos=videos))
    return made


def check_questions(method: str, family: str, slots: int, sampling: Sampling | None = None) -> Read:
    """Output equals the oracle's with shared prefixes; returns the target's prefills."""
    target = toys.target(family)
    engine = Engine(target, METHODS[method][0](family), slots, 160)
    wanted = questions(family, sampling)
    with pytest.MonkeyPatch.context() as patch, small_savings():
        read = Read(patch, engine._lanes)
        done = checks.run(engine, wanted)
    oracle = checks.generated if sampling is None else checks.referenced
    for request in wanted:
        result = done[request.sample_id]
        assert result.token_ids == oracle(family, request, target.eos_ids), (method, family, request.sample_id)
        checks.check_telemetry(result)
    return read


def check_drafts(method: str, family: str, wanted: Sequence[Request]) -> None:
    """Acceptance equals that of samples alone: sharing does not change drafts."""
    results = []
    for slots in (1, 9):
        engine = Engine(toys.target(family), METHODS[method][0](family), slots, 160)
        with small_savings():
            done = checks.run(engine, wanted)
        results.append(
            {key: (completion.token_ids, completion.telemetry.acceptance_histogram) for key, completion in done.items()}
        )
    assert sum(sum(taken[1:]) for _, taken in results[0].values()) > 0, "no draft was ever taken"
    assert sorted(results[0].items()) == sorted(results[1].items()), (method, family)


def check_states(family: str, wanted: Sequence[Request] = ()) -> int:
    """Rows and states behind a stem equal those of whole prompts; returns the number of continuations."""
    target = toys.target(family)
    prompts = [
        [target.encode(request.prompt, request.images, request.videos)] for request in wanted or questions(family)
    ]
    slots = SlotBatch(torch.arange(len(prompts)), tuple(range(len(prompts))), (0,) * len(prompts))
    together, alone = (target.lanes(len(prompts), 1, 160) for _ in range(2))
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch, small_savings():
        read = Read(patch, together)
        states = together.admit(slots, prompts)
        other = alone.admit(slots, [[replace(prompt)] for (prompt,) in prompts])
    torch.testing.assert_close(states.last, other.last, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(together.cache.lens, alone.cache.lens)
    torch.testing.assert_close(together.rows.delta, alone.rows.delta)
    for row, (prompt,) in enumerate(prompts):
        torch.testing.assert_close(states.hidden_of(row), other.hidden_of(row), atol=2e-4, rtol=1e-4)
        checks.compare_row(together, row, prompt, ())
    return read.behind


def check_picture_last(family: str) -> None:
    """Prompts whose image follows different words: features that layers add are never behind a stem."""
    words = " ".join(f"w{5 + i}" for i in range(30))
    text, pictures = toys.prompt(family, 2)
    assert pictures
    position = text.index(toys.FAMILIES[family].placeholder)
    wanted = [Request(str(i), f"{words} w{20 + i} {text[position:]}", pictures) for i in range(3)]
    assert check_states(family, wanted) == 0
