"""Store keys and values with a length per row: a slot owns R rows ("lanes"), and rows are not padded."""

from __future__ import annotations

import torch
from torch import Tensor


class RaggedCache:
    """K and V of every layer, shape (rows, H_kv, capacity + 1, D_h), with one length per row.

    A layer's tensors are allocated at its first write, when head count, head size, dtype and device are known. `lens`
    (rows,) counts the committed positions; positions from there on are scratch and hold the nodes of the last forward.
    """

    def __init__(self, num_rows: int, capacity: int, num_layers: int, device: torch.device) -> None:
        # At least two rows, because torch.compile specializes axes of length 1.
        self.num_rows = max(2, num_rows)
        self.capacity = capacity
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.lens = torch.zeros(self.num_rows, dtype=torch.long, device=device)

    @classmethod
    def over(cls, keys: list[Tensor | None], values: list[Tensor | None]) -> RaggedCache:
        """Wrap allocated K and V of each layer for one forward; the result has no `lens`."""
        memory = cls.__new__(cls)
        memory.keys, memory.values = keys, values
        return memory

    @property
    def is_made(self) -> bool:
        """Whether every layer has been written to."""
        return all(memory is not None for memory in self.keys)

    def write(self, layer: int, rows: Tensor, columns: Tensor, keys: Tensor, values: Tensor) -> None:
        """Scatter `keys` and `values` (r, H_kv, N, D_h) to the KV positions `columns` (r, N) of `rows` (r,)."""
        if self.keys[layer] is None:
            # One position more than any window, so that compiled graphs do not specialize on a window of all positions.
            shape = (self.num_rows, keys.shape[1], self.capacity + 1)
            # Zeros, not empty memory: a NaN at a masked position makes the weighted sum NaN, because 0 * NaN is NaN.
            self.keys[layer] = keys.new_zeros((*shape, keys.shape[3]))
            self.values[layer] = values.new_zeros((*shape, values.shape[3]))
        index = rows[:, None]
        self.keys[layer][index, :, columns] = keys.transpose(1, 2)  # type: ignore[index]
        self.values[layer][index, :, columns] = values.transpose(1, 2)  # type: ignore[index]

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
        index = rows[:, None]
        for memory in (*self.keys, *self.values):
            if memory is not None:
                there, to, origin = (part.to(memory.device) for part in (index, to_columns, from_columns))
                memory[there, :, to] = memory[there, :, origin]

    def copy(self, source: Tensor, rows: Tensor, num_columns: int) -> None:
        """Copy the first `num_columns` KV positions of rows `source` (r,) to `rows` (r,). `lens` does not change."""
        for memory in (*self.keys, *self.values):
            if memory is not None:
                memory[rows.to(memory.device), :, :num_columns] = memory[source.to(memory.device), :, :num_columns]

    def zero(self, rows: Tensor, start: int, end: int) -> None:
        """Zero the KV positions of `rows` (r,) from `start` to `end`."""
        if start >= end:
            return
        for memory in (*self.keys, *self.values):
            if memory is not None:
                memory[rows.to(memory.device), :, start:end] = 0.0

    def zero_scratch(self, rows: Tensor, lens: Tensor, start: int, end: int) -> None:
        """Zero the scratch positions from `start` to `end` of `rows` (r,) with `lens` (r,) positions, in all layers."""
        if start >= end:
            return
        columns = lens[:, None] + torch.arange(start, end, device=lens.device)
        for memory in (*self.keys, *self.values):
            if memory is not None:
                index = (rows[:, None].to(memory.device), slice(None), columns.to(memory.device))
                memory[index] = memory.new_zeros(())

    def advance(self, rows: Tensor, count: Tensor) -> None:
        """Add `count` (r,) to the committed positions of `rows` (r,)."""
        self.lens.index_add_(0, rows, count)
