"""Images on the device: LlamaGen's XL shape, every step replayed, beside the same steps eager.

Codes are drawn with guidance and the sample's own noise, so both ways draw the same images but for rounding: how many
are equal stands beside the speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_decoding import check
from benchmarks.gpu_models import CAPTURED, EAGER, ImageModels, plain
from benchmarks.gpu_sizes import Sizes
from decoding import Engine, Request, Sampling

GUIDANCE = 4.0


def measure_images(
    images: ImageModels, sizes: Sizes, has_time: Callable[[], bool]
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each way, one batch of images, and what was left out and why."""
    drawn, seconds = {}, {}
    left_out = []
    for step in (CAPTURED, EAGER):
        if drawn and not has_time():
            left_out.append(f"{step}: the section's time was used up")
            continue
        model = images.models[step]
        engine = Engine(model, plain(), sizes.images, model.gpt.shape.num_condition_tokens + sizes.grid**2)
        if step == CAPTURED:
            # Images are of one length, so recording takes a whole batch.
            draw(engine, images, sizes)
        start = time.perf_counter()
        drawn[step] = draw(engine, images, sizes)
        seconds[step] = time.perf_counter() - start
    rows = []
    for step, codes in drawn.items():
        same = [one == other for one, other in zip(codes, drawn[CAPTURED], strict=True)]
        places = [a == b for one, other in zip(codes, drawn[CAPTURED], strict=True) for a, b in zip(one, other)]
        rows.append(
            {
                "step": step,
                "batch": sizes.images,
                "codes": sizes.grid**2,
                "seconds": seconds[step],
                "images_per_s": sizes.images / seconds[step],
                "equal_images": sum(same),
                "equal_codes": sum(places) / len(places),
            }
        )
    return rows, left_out


def draw(engine: Engine, images: ImageModels, sizes: Sizes) -> list[list[int]]:
    """One batch of images: their codes.

    Raises:
        RuntimeError: a request gave an error.
    """
    asked = requests(images, sizes.images, sizes.grid**2)
    done = {one.sample_id: one for one in engine.run(asked)}
    return [list(one.token_ids) for one in check([done[request.sample_id] for request in asked])]


def requests(images: ImageModels, number: int, num_codes: int) -> list[Request]:
    """One image of each class in turn."""
    sampling = Sampling(max_new_tokens=num_codes, temperature=1.0, guidance_scale=GUIDANCE)
    return [
        Request(f"image-{place:04d}", "", sampling=sampling, condition=place % images.num_classes)
        for place in range(number)
    ]
