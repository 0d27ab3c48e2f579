"""Times images on the device in LlamaGen's XL shape, captured and eager, which draw the same images up to rounding."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from typing import Any

from benchmarks.gpu.models import CAPTURED, EAGER, ImageModels, plain
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.engines import run_requests
from decoding import Engine, Request, Sampling

GUIDANCE = 4.0


def measure_images(
    images: ImageModels, sizes: Sizes, has_time: Callable[[], bool]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one row for captured and one for eager steps, a batch of images each, and what was left out and why."""
    num_codes = sizes.grid**2
    sampling = Sampling(max_new_tokens=num_codes, temperature=1.0, guidance_scale=GUIDANCE)
    requests = [
        Request(f"image-{place:04d}", "", sampling=sampling, condition=place % images.num_classes)
        for place in range(sizes.images)
    ]
    rows: list[dict[str, Any]] = []
    left_out = []
    expected: list[tuple[int, ...]] = []
    for step in (CAPTURED, EAGER):
        if rows and not has_time():
            left_out.append(f"{step}: the section's time was used up")
            continue
        model = images.models[step]
        engine = Engine(model, plain(), sizes.images, model.gpt.shape.num_condition_tokens + num_codes)
        if step == CAPTURED:
            run_requests(engine, requests)  # all images have one length, so capturing needs a whole batch
        start = time.perf_counter()
        codes = [one.token_ids for one in run_requests(engine, requests)]
        seconds = time.perf_counter() - start
        expected = expected or codes
        pairs = list(zip(chain(*codes), chain(*expected), strict=True))
        rows.append(
            {
                "step": step,
                "batch": sizes.images,
                "codes": num_codes,
                "seconds": seconds,
                "images_per_s": sizes.images / seconds,
                "equal_images": sum(one == other for one, other in zip(codes, expected, strict=True)),
                "equal_codes": sum(one == other for one, other in pairs) / len(pairs),
            }
        )
    return rows, left_out
