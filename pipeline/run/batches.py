"""Chooses the rows of a batch: large batches cost the driver less per row, small ones share a job among its actors."""

from __future__ import annotations

from configs.pool import LEAST_BATCH_ROWS, EnginePool
from configs.synthesis import SynthesizeJob

MOST_BATCH_ROWS = 512
"""Most result rows of a batch. An actor that dies computes its batches again."""
MOST_BATCH_IMAGES = 128
"""Most images of a batch, which bounds its pixels: 100 MB at 512 × 512."""
BATCHES_PER_ACTOR = 64
"""Least batches of an actor, if batches have more than the least rows; so actors end at about the same time."""
ROWS_PER_SLOT = 2
"""Least rows in flight for each slot, so that free slots find a next row."""
ASSUMED_SLOTS = 64
"""Slots of an engine whose number is known only when it is loaded; the rows in flight bound them."""


def choose_batch_rows(pool: EnginePool, num_samples: int | None, rows_per_sample: int, most_rows: int) -> int:
    """Return the samples of a batch; an unknown number of samples (None) counts as large.

    `most_rows` bounds the result rows of a batch, unless the slots need more.
    """
    if pool.batch_rows != "auto":
        return pool.batch_rows
    slots = ASSUMED_SLOTS if pool.slots == "auto" else pool.slots
    needed = -(-ROWS_PER_SLOT * slots // (pool.max_batches_in_flight * rows_per_sample))
    most = max(needed, most_rows // rows_per_sample, 1)
    least = max(needed, min(LEAST_BATCH_ROWS, most))
    fair = most if num_samples is None else num_samples // (pool.max_size * BATCHES_PER_ACTOR)
    return max(least, min(fair, most))


def rows_per_image_batch(config: SynthesizeJob) -> int:
    """Return the images of a batch between the stages of a synthesis job, a multiple of `vq.batch_rows`."""
    num_images = config.pool.rows_per_batch * config.sampling.num_images_per_prompt
    forwards = min(num_images, MOST_BATCH_IMAGES) // config.vq.batch_rows
    return config.vq.batch_rows * max(1, forwards)
