"""Decides when free slots are refilled: a prefill stops all rows that decode, and an empty slot is a loss too.

On a GPU the prefill of a few prompts takes as long as several decoding steps, whatever their number, because it
launches every kernel of the decoder. Merging the prefills of k slots saves k − 1 of them and leaves slots empty
meanwhile. With S slots, λ ends per step and prefills that take as long as s steps, the loss is least at k = √(2 λ s S),
the economic order quantity (Harris 1913). Times are not measured, so that batches do not depend on the machine's load.
"""

from __future__ import annotations

import math

WINDOW_STEPS = 256
"""Steps over which the number of ends per step is averaged."""


class Refill:
    """Decides before each step whether free slots are refilled; with `prefill_steps` 0 they are whenever one is free.

    A request waits at most 2 · `prefill_steps` · `num_slots` steps for a free slot.
    """

    def __init__(self, num_slots: int, prefill_steps: float) -> None:
        self._num_slots = self._num_free = num_slots
        self._limit = prefill_steps * num_slots
        self._lost = 0
        self._num_steps = 0
        self._ends_per_step = 0.0

    def is_due(self, num_free: int, num_ready: int, has_active: bool) -> bool:
        """Return whether to fill free slots with the `num_ready` requests that can be admitted before the next step; at
        once if nothing decodes (`has_active`)."""
        self._num_steps = min(self._num_steps + 1, WINDOW_STEPS)
        self._ends_per_step += (max(0, num_free - self._num_free) - self._ends_per_step) / self._num_steps
        self._num_free = num_free
        num_fillable = min(num_free, num_ready)
        if num_fillable == 0:
            return False
        self._lost += num_fillable
        best = min(self._num_slots, round(math.sqrt(2.0 * self._ends_per_step * self._limit)))
        return not has_active or num_fillable >= best or self._lost >= 2.0 * self._limit

    def done(self, num_free: int) -> None:
        """Note that slots were filled, and `num_free` are left."""
        self._lost, self._num_free = 0, num_free
