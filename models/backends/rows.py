"""Assign the rows of a KV cache to slots, R rows ("lanes") per slot, and gather the rows of one forward.

If attention reads rows by number, as the tree kernel of a GPU does, a slot keeps its rows. Otherwise attention reads
the leading rows as a view, and slots that decode together are moved to the leading blocks of R rows. Shapes: b slots, r
= b · R rows, slot-major.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from models.backends.base import Backend
from models.backends.cache import RaggedCache

NUM_AXES = 3
"""Rotary axes of multimodal models: time, height and width."""
WINDOW_STEP = 64
"""Attention windows are rounded up to a multiple of this many KV positions, so that few shapes occur."""


class Slots(Protocol):
    """Slots of one forward, see `models.kv.lanes.SlotBatch`."""

    @property
    def index(self) -> Tensor: ...

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def num_generated(self) -> tuple[int, ...]: ...

    def counted(self, values: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class ForwardRows:
    """Rows of one forward: row numbers `rows` (r,), committed positions `lens` (r,), rotary offsets `delta` (r,) and,
    for three rotary axes, `axes` (r, 3); at most `window` KV positions are read.

    If rows are not in the order of the batch, `there` (r,) maps batch order to row order, and `back` (b,) slots back.
    """

    rows: Tensor
    lens: Tensor
    delta: Tensor
    axes: Tensor | None
    window: int
    there: Tensor | None = None
    back: Tensor | None = None


class SlotRows:
    """Rows of `num_slots` slots in `cache`, `num_lanes` for each, with their rotary offsets.

    `delta` (rows,) is the difference between rotary position and KV position; `axes` (rows, 3) are additional offsets
    of three rotary axes, None until a prompt has three axes. `prefix_lengths` are the committed positions of each slot
    after its prefill, on the host.
    """

    def __init__(self, cache: RaggedCache, num_slots: int, num_lanes: int, backend: Backend) -> None:
        device = cache.lens.device
        self.cache, self._num_lanes, self._backend = cache, num_lanes, backend
        self.delta = torch.zeros(num_slots * num_lanes, dtype=torch.long, device=device)
        self.axes: Tensor | None = None
        self.prefix_lengths = [0] * num_slots
        self._num_used_columns = 0
        self._pages: dict[int, Sequence[Sequence[int]]] = {}
        self._block_of = list(range(num_slots))
        self._blocks = torch.arange(num_slots, device=device)
        self._numbers = torch.arange(num_slots * num_lanes, device=device)

    def take(self, num_positions: int) -> list[list[int]] | None:
        """Reserve pages for `num_positions` positions of each row of a slot, see `RaggedCache.take`."""
        return self.cache.take(self._num_lanes, num_positions)

    def has(self, num_positions: int) -> bool:
        """Return whether `take` would succeed."""
        return self.cache.has(self._num_lanes, num_positions)

    def refuse(self, num_positions: int) -> str:
        """Return why a slot can never have `num_positions` positions in each row, or an empty string."""
        return self.cache.refuse(self._num_lanes, num_positions)

    def assign(self, slots: Slots, pages: Sequence[Sequence[Sequence[int]]]) -> None:
        """Give slots their reserved pages, with one copy to the device."""
        entries = [number for some in pages for row in some for number in self.cache.entry_of(row)]
        if entries:
            self._pages |= dict(zip(slots.ids, pages, strict=True))
            rows = self.of(slots)
            self.cache.assign(rows, self._backend.copy_to_device(entries, rows.device).view(rows.shape[0], -1))

    def release(self, slot: int) -> None:
        """Return the pages of a slot. Kernels that were launched before may still write to them: kernels of the next
        sample run after these."""
        if (pages := self._pages.pop(slot, None)) is not None:
            self.cache.release(self.first_of(slot), pages)

    @property
    def are_indexed(self) -> bool:
        """Whether attention reads rows by number, each up to its length."""
        return self._backend.reads_rows(self.cache)

    def of(self, slots: Slots) -> Tensor:
        """Return the rows (r,) of `slots`, slot-major."""
        return self._of_blocks(self._blocks[slots.index])

    def first_of(self, slot: int) -> int:
        """Return the first row of a slot, which is valid until the next `gather`."""
        return self._block_of[slot] * self._num_lanes

    def spread(self, values: Tensor) -> Tensor:
        """Repeat values of slots (b, …) for their rows (r, …)."""
        return values if self._num_lanes == 1 else values.repeat_interleave(self._num_lanes, dim=0)

    def clear(self, slots: Slots, shortest: int, longest: int) -> Tensor:
        """Clear the rows of `slots` for prompts of `shortest` to `longest` tokens; return the rows."""
        rows = self.of(slots)
        self.cache.lens[rows] = 0
        if self.cache.states is not None:
            self.cache.states.clear(slots.ids, rows)
        if not self.are_indexed:
            # A NaN of an earlier sample at a masked position makes attention outputs NaN: 0 · NaN is NaN.
            self.cache.zero(rows, shortest, self._num_used_columns)
            self._num_used_columns = max(self._num_used_columns, longest)
        return rows

    def fill(self, slots: Slots, lens: Sequence[int], delta: Sequence[Tensor], axes: Sequence[Tensor | None]) -> None:
        """Set the committed positions and rotary offsets of each row of `slots` after a prefill."""
        rows, device = self.of(slots), self.delta.device
        self.cache.lens[rows] = torch.tensor(lens, device=device)
        self.delta[rows] = torch.stack(list(delta))
        if any(offset is not None for offset in axes):
            self.make_axes()
        if self.axes is not None:
            none = self.axes.new_zeros(NUM_AXES)
            self.axes[rows] = torch.stack([none if offset is None else offset for offset in axes])
        for number, slot in enumerate(slots.ids):
            self.prefix_lengths[slot] = max(lens[number * self._num_lanes : (number + 1) * self._num_lanes])

    def make_axes(self) -> None:
        """Create the offsets of three rotary axes."""
        if self.axes is None:
            self.axes = self.delta.new_zeros(self.delta.shape[0], NUM_AXES)

    def empty(self, slots: Slots) -> None:
        """Clear the slots, as after a prompt of length 0."""
        rows = self.clear(slots, 0, 0)
        self.delta[rows] = 0
        if self.axes is not None:
            self.axes[rows] = 0
        for slot in slots.ids:
            self.prefix_lengths[slot] = 0

    def gather(self, slots: Slots, num_scratch: int) -> ForwardRows:
        """Return the rows of a forward that reads `num_scratch` scratch positions; it may move rows."""
        if self.are_indexed:
            rows = self.of(slots)
            # Spare slots read no committed positions, and write to the first positions of their rows.
            lens = slots.counted(self.cache.lens[rows].view(-1, self._num_lanes)).flatten()
            axes = None if self.axes is None else self.axes[rows]
            return ForwardRows(rows, lens, self.delta[rows], axes, self.cache.capacity)
        self._lead(slots)
        num_rows = len(slots.ids) * self._num_lanes
        rows, axes = self._numbers[:num_rows], None if self.axes is None else self.axes[:num_rows]
        leading = (rows, self.cache.lens[:num_rows], self.delta[:num_rows], axes, self._window(slots, num_scratch))
        if all(self._block_of[slot] == index for index, slot in enumerate(slots.ids)):
            return ForwardRows(*leading)
        blocks = self._blocks[slots.index]
        return ForwardRows(*leading, self._of_blocks(blocks.argsort()), blocks)

    def commit(self, slots: Slots, source: Tensor, keep: Tensor) -> None:
        """Commit the first `keep` (b,) of scratch positions `source` (b, P), see `models.kv.lanes.LaneModel.commit`."""
        rows, keep = self.of(slots), self.spread(slots.counted(keep))
        self.cache.compact(rows, self.spread(source), keep)
        self.cache.advance(rows, keep)

    def _of_blocks(self, blocks: Tensor) -> Tensor:
        if self._num_lanes == 1:
            return blocks
        return (blocks[:, None] * self._num_lanes + self._numbers[: self._num_lanes]).flatten()

    def _window(self, slots: Slots, num_scratch: int) -> int:
        """Return how many KV positions a forward reads at most, and count them as used."""
        needed = max(self.prefix_lengths[s] + n for s, n in zip(slots.ids, slots.num_generated, strict=True))
        window = min(-(-(needed + num_scratch) // WINDOW_STEP) * WINDOW_STEP, self.cache.capacity)
        self._num_used_columns = max(self._num_used_columns, window)
        return window

    def _lead(self, slots: Slots) -> None:
        """Move the slots to the leading blocks."""
        b = len(slots.ids)
        holes = set(range(b)) - {self._block_of[slot] for slot in slots.ids}
        if holes:
            holder = {block: slot for slot, block in enumerate(self._block_of)}
            for slot in slots.ids:
                if self._block_of[slot] >= b:
                    self._swap(slot, holder[holes.pop()])

    def _swap(self, first: int, second: int) -> None:
        """Swap the blocks of two slots, KV cache rows and per-row state included."""
        starts = (self.first_of(slot) for slot in (first, second))
        here, there = (slice(start, start + self._num_lanes) for start in starts)
        states = () if self.cache.states is None else self.cache.states.tensors()
        for memory in (*self.cache.keys, *self.cache.values, self.cache.lens, self.delta, self.axes, *states):
            if memory is not None:
                saved = memory[here].clone()
                memory[here] = memory[there]
                memory[there] = saved
        self._block_of[first], self._block_of[second] = self._block_of[second], self._block_of[first]
        for slot in (first, second):
            # `fill_` passes the number to the kernel; an assignment would copy it from the host and wait.
            self._blocks[slot].fill_(self._block_of[slot])
