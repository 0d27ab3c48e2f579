"""Decodes tables of image codes to tables with pixels, in the same order, as a Ray Data actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from actors.results import result_table, torch_threads
from actors.serving.crash_ledger import CrashLedger, ProcessLedger
from actors.serving.engine_thread import end_process
from configs.synthesis import SynthesizeJobConfig

FAILURE = {
    "status": "error",
    "error_type": "non_finite_pixels",
    "error_message": "the VQ model's pixels are not finite for these codes; try another dtype",
    "finish_reason": "error",
}
"""Result columns of an image with non-finite pixels."""

if TYPE_CHECKING:
    from actors.loading.image_pair import VqPainter

LoadPainter = Callable[[SynthesizeJobConfig, int | None], "VqPainter"]


def load_painter(config: SynthesizeJobConfig, num_threads: int | None) -> VqPainter:
    """Load the VQ model; imports torch, inside the actor's process."""
    import torch

    from actors.loading import image_pair

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return image_pair.load_painter(config)


class Paint:
    """Decodes `vq.batch_rows` images per forward.

    Smaller batches are padded with copies of an image, so that pixels do not depend on the batch size.
    """

    def __init__(
        self,
        config: SynthesizeJobConfig,
        schema: pa.Schema,
        load: LoadPainter = load_painter,
        ledger: CrashLedger | None = None,
    ) -> None:
        self._schema = schema
        self._batch_rows = config.vq.batch_rows
        with ProcessLedger(ledger).loading():
            self._painter = load(config, torch_threads(config.vq))

    def __call__(self, table: pa.Table) -> pa.Table:
        """Decode one table of the stage `coded`; rows with an error get no pixels."""
        blank = {"rgb": b"", "width_px": 0, "height_px": 0}
        rows = [row | blank for row in table.select(list(FAILURE)).to_pylist()]
        good = [index for index, row in enumerate(rows) if not row["error_type"]]
        codes = table.column("codes")
        for start in range(0, len(good), self._batch_rows):
            part = good[start : start + self._batch_rows]
            drawn = np.stack([codes[index].values.to_numpy() for index in part])
            filled = np.concatenate([drawn, np.repeat(drawn[:1], self._batch_rows - len(part), axis=0)])
            try:
                pixels, finite = self._painter.paint(filled)
            except Exception as error:  # codes are valid, so the device failed
                end_process(error)
                raise
            for image, is_finite, index in zip(pixels, finite, part):
                height, width, _ = image.shape
                painted = {"rgb": image.tobytes(), "width_px": width, "height_px": height}
                rows[index] |= painted if is_finite else FAILURE
        return result_table(self._schema, table, {}, rows)
