"""What has to hold where samples share prompts: outputs as if they did not, memory as after a prefill of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from decoding import Engine, Request, Sampling
from decoding.contracts import Probe
from decoding.drafters import ModelDrafter
from models.lanes import LaneModel
from tests import toys
from tests.conformance import checks, images
from tests.conformance.methods import METHODS

NUM_PROMPTS = 3
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.95)


def equal_prompts(family: str, count: int = 9, sampling: Sampling | None = None) -> list[Request]:
    """Requests of three prompts in turns; each has arrays, a seed and a limit of its own."""
    base = sampling or Sampling()
    made = []
    for i in range(count):
        text, pictures = toys.prompt(family, i % NUM_PROMPTS)
        text, videos = toys.with_video(family, text, 1) if i % NUM_PROMPTS == 1 else (text, ())
        own = tuple(picture.copy() for picture in pictures)
        limits = replace(base, max_new_tokens=4 + (5 * i) % 13)
        made.append(Request(f"sample-{i}", text, own, limits, seed=i, videos=videos))
    return made


class RowsRun:
    """How many prompts the forwards of one model read."""

    def __init__(self, lanes: LaneModel) -> None:
        self.count = 0
        inner = lanes._run_prompts

        def counted(rows: Any, prefixes: Any, probe_attention: bool) -> Any:
            self.count += len(prefixes)
            return inner(rows, prefixes, probe_attention)

        lanes._run_prompts = counted  # type: ignore[method-assign]


def check_equal_prompts(method: str, family: str, slots: int, sampling: Sampling | None = None) -> int:
    """Output equals the oracle's, whoever shares a prompt; returns how many prompts the target read."""
    target = toys.target(family)
    engine = Engine(target, METHODS[method][0](family), slots, 160)
    read = RowsRun(engine._lanes)
    wanted = equal_prompts(family, sampling=sampling)
    done = checks.run(engine, wanted)
    oracle = checks.generated if sampling is None else checks.referenced
    for request in wanted:
        told = done[request.sample_id]
        assert told.token_ids == oracle(family, request, target.eos_ids), (method, family, request.sample_id)
        checks.check_telemetry(told)
        prefix = target.encode(request.prompt, request.images, request.videos)
        assert told.num_input_tokens == prefix.length
    return read.count


def check_memory(family: str, method: str = "sd-chain", wanted: Sequence[Request] = ()) -> None:
    """After every step each row holds what a prefill of its own tokens gives, in the target and in the drafter."""
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
            checks.compare_row(engine._lanes, engine._lanes.first_row_of(slot), prefix, progress.token_ids[:-1])
            if isinstance(made.drafter, ModelDrafter):
                guess = made.drafter
                held = len(progress.token_ids) - int(guess._num_pending[slot])
                own = guess.prefixes(request, Probe(prefix))[0]
                checks.compare_row(guess.lanes, guess.lanes.first_row_of(slot), own, progress.token_ids[:held])
            num_compared += 1
    assert num_compared > 10


def check_images(method: str, kind: str, mode: str = "sampled-guided") -> int:
    """Images of one condition with several seeds equal those made one at a time; returns how many prompts were read."""
    sampling = images.MODES[mode]
    base = images.images.requests(kind, 2, sampling)
    wanted = [replace(base[i % 2], sample_id=f"image-{i}", seed=i, replica=i) for i in range(6)]
    outputs = []
    for slots in (1, 6):
        target = images.images.target(kind, guided=sampling.guidance_scale > 1.0)
        engine = Engine(target, images.METHODS[method](target, kind), slots, 64)
        read = RowsRun(engine._lanes)
        outputs.append({key: one.token_ids for key, one in checks.run(engine, wanted).items()})
    assert outputs[0] == outputs[1], (method, kind)
    assert len(set(outputs[0].values())) == 6 or sampling.temperature == 0
    return read.count


def check_pictures_alone(family: str) -> None:
    """Samples of one text over different pictures of one size are different samples."""
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
    told = []
    for request in wanted:
        inputs = toys.front_end(family).encode(request.prompt, request.images)
        out: Any = toys.oracle(family).generate(  # type: ignore[operator]
            **inputs, max_new_tokens=8, do_sample=False, eos_token_id=sorted(target.eos_ids)
        )
        told.append(tuple(out[0, inputs["input_ids"].shape[1] :].tolist()))
    assert [done[request.sample_id].token_ids for request in wanted] == told
    assert len(set(told)) > 1, "the pictures make a difference"
