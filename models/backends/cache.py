"""Store keys and values with a length per row: a slot owns R rows ("lanes"), and rows are not padded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.backends.mask_rules import PLAIN, LayerRule
from models.backends.states.memory import RecurrentStates


class RaggedCache:
    """K and V of every layer, shape (rows, H_kv, capacity + 1, D_h), with one length per row.

    A layer's tensors are allocated at its first write, when head count, head size, dtype and device are known. `lens`
    (rows,) counts the committed positions; positions from there on are scratch and hold the nodes of the last forward.
    The memory of a layer is a number of blocks of `block_size` positions: here each row is one block. `rules` are those
    of the layers, empty if all are plain; a layer with a window keeps all positions and reads the last ones. `states`
    are those of recurrent layers, None if there are none; layers without attention have no K and V.
    """

    rules: Sequence[LayerRule] = ()
    states: RecurrentStates | None = None

    def __init__(self, num_rows: int, capacity: int, num_layers: int, device: torch.device) -> None:
        # At least two rows, because torch.compile specializes axes of length 1.
        self.num_rows = max(2, num_rows)
        self.capacity = capacity
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.lens = torch.zeros(self.num_rows, dtype=torch.long, device=device)
        # One position more than any window, so that compiled graphs do not specialize on a window of all positions. It
        # holds what nothing reads.
        self.num_blocks, self.block_size = self.num_rows, capacity + 1

    @classmethod
    def over(cls, keys: list[Tensor | None], values: list[Tensor | None]) -> RaggedCache:
        """Wrap allocated K and V of each layer for one forward; the result has no `lens`."""
        memory = cls.__new__(cls)
        memory.keys, memory.values = keys, values
        return memory

    @property
    def is_made(self) -> bool:
        """Whether every layer with its own K and V has been written to."""
        if self.states is not None:
            return self.states.has_run
        return all(memory is not None or self.rule_of(i).owner is not None for i, memory in enumerate(self.keys))

    @property
    def unread(self) -> tuple[int, int]:
        """Block and offset of a position that is never read."""
        return 0, self.capacity

    def locate(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return block and offset of the KV positions `columns` (r, N) of `rows` (r,), broadcast to (r, N)."""
        return rows[:, None], columns

    def blocks(self, rows: Tensor) -> Tensor:
        """Return the blocks (r, P) int32 of `rows` (r,) in the order of their positions."""
        return rows.to(torch.int32)[:, None]

    def take(self, num_rows: int, num_positions: int) -> list[list[int]] | None:
        """Reserve memory for `num_positions` positions of `num_rows` rows; None if there is not enough. Here each row
        has its own, and nothing is reserved."""
        return []

    def has(self, num_rows: int, num_positions: int) -> bool:
        """Return whether `take` would succeed."""
        return True

    def refuse(self, num_rows: int, num_positions: int) -> str:
        """Return why `take` can never succeed, or an empty string."""
        return ""

    def assign(self, rows: Tensor, pages: Tensor) -> None:
        """Give `rows` (r,) their reserved memory, see `entry_of`."""

    def release(self, first_row: int, pages: Sequence[Sequence[int]]) -> None:
        """Return the reserved memory of consecutive rows."""

    def entry_of(self, pages: Sequence[int]) -> list[int]:
        """Return the numbers that `assign` takes for a row with these pages."""
        return []

    def write(self, layer: int, index: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        """Scatter `keys` and `values` (r, H_kv, N, D_h) to the blocks and offsets of `index`, see `locate`."""
        if self.keys[layer] is None:
            shape = (self.num_blocks, keys.shape[1], self.block_size)
            # Zeros, not empty memory: a NaN at a masked position makes the weighted sum NaN, because 0 * NaN is NaN.
            self.keys[layer] = keys.new_zeros((*shape, keys.shape[3]))
            self.values[layer] = values.new_zeros((*shape, values.shape[3]))
        blocks, offsets = index
        self.keys[layer][blocks, :, offsets] = keys.transpose(1, 2)  # type: ignore[index]
        self.values[layer][blocks, :, offsets] = values.transpose(1, 2)  # type: ignore[index]

    def rule_of(self, layer: int) -> LayerRule:
        """Return the rule of a layer."""
        return self.rules[layer] if self.rules else PLAIN

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all K and V of a layer, (rows, H_kv, capacity + 1, D_h) each."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None, f"layer {layer} is read before its first write"
        assert values is not None
        return keys, values

    def read(self, layer: int, rows: Tensor, num_leading_rows: int | None, window: int) -> tuple[Tensor, Tensor]:
        """Return K and V of the first `window` positions of `rows`, (r, H_kv, window, D_h) each.

        If `num_leading_rows` is n, rows 0 … n − 1 are returned as views; if None, `rows` (r,) are copied.
        """
        keys, values = self.layer(layer)
        if num_leading_rows is not None:
            return keys[:num_leading_rows, :, :window], values[:num_leading_rows, :, :window]
        return keys[rows, :, :window], values[rows, :, :window]

    def compact(self, rows: Tensor, source: Tensor, keep: Tensor) -> None:
        """Move KV positions `lens + source[:, i]` to `lens + i` for i < `keep` (r,); `source` (r, P) are offsets.

        Other positions and `lens` do not change; see `advance`.
        """
        if source.shape[1] == 0:
            return
        offset = torch.arange(source.shape[1], device=source.device)[None]
        base = self.lens[rows][:, None]
        # Beyond `keep`, positions are copied onto themselves. The right-hand side is gathered before it is written.
        from_columns = base + torch.where(offset < keep[:, None], source, offset)
        to_columns = (base + offset).clamp_max(self.capacity - 1)
        from_columns = from_columns.clamp_max(self.capacity - 1)
        self._move(self.locate(rows, from_columns), self.locate(rows, to_columns))

    def copy(self, source: Tensor, rows: Tensor, num_columns: int) -> None:
        """Copy the first `num_columns` KV positions of rows `source` (r,) to `rows` (r,), and the states of recurrent
        layers. `lens` does not change."""
        columns = torch.arange(num_columns, device=rows.device).expand(rows.shape[0], -1)
        self._move(self.locate(source, columns), self.locate(rows, columns))
        if self.states is not None:
            self.states.copy(source, rows)

    def _move(self, origin: tuple[Tensor, Tensor], there: tuple[Tensor, Tensor]) -> None:
        """Copy KV positions in all layers; they are read before any is written."""
        for memory in (*self.keys, *self.values):
            if memory is not None:
                blocks, offsets, from_blocks, from_offsets = (part.to(memory.device) for part in (*there, *origin))
                memory[blocks, :, offsets] = memory[from_blocks, :, from_offsets]

    def zero(self, rows: Tensor, start: int, end: int) -> None:
        """Zero the KV positions of `rows` (r,) from `start` to `end`."""
        if start >= end:
            return
        self._zero(rows, torch.arange(start, end, device=rows.device).expand(rows.shape[0], -1))

    def zero_scratch(self, rows: Tensor, lens: Tensor, start: int, end: int) -> None:
        """Zero the scratch positions from `start` to `end` of `rows` (r,) with `lens` (r,) positions, in all layers."""
        if start >= end:
            return
        self._zero(rows, lens[:, None] + torch.arange(start, end, device=lens.device))

    def _zero(self, rows: Tensor, columns: Tensor) -> None:
        blocks, offsets = self.locate(rows, columns)
        for memory in (*self.keys, *self.values):
            if memory is not None:
                memory[blocks.to(memory.device), :, offsets.to(memory.device)] = memory.new_zeros(())

    def advance(self, rows: Tensor, count: Tensor) -> None:
        """Add `count` (r,) to the committed positions of `rows` (r,)."""
        self.lens.index_add_(0, rows, count)
        if self.states is not None:
            self.states.commit(rows, count)
