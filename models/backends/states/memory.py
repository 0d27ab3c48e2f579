"""Stores the states of recurrent layers per row: convolution inputs, the state S, and the inputs of the last step.

A step does not change S: it keeps the inputs of its nodes, and the next step first applies those of the accepted nodes
to S ("replay"), then runs its own nodes behind it. So a commit is no more than the number of accepted nodes. Decision
57 has the reasons. Shapes: r rows, N nodes, K the size of a convolution's kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.backends.recorder import is_in_whole_step


@dataclass
class LayerStates:
    """States of one layer: `conv` (rows, channels, K − 1 + capacity), `state` (rows, …) fp32, None if the layer has
    none, and `kept`, the inputs (rows, capacity, …) of the nodes of the last step by name.

    `conv` starts with the K − 1 inputs before the last step, followed by the inputs of its nodes.
    """

    conv: Tensor | None = None
    state: Tensor | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)
    num_before: int = 0

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors; their first axis is the row."""
        yield from (tensor for tensor in (self.conv, self.state) if tensor is not None)
        yield from self.kept.values()

    def widen(self, capacity: int) -> None:
        """Make room for the inputs of `capacity` nodes."""
        if self.conv is not None:
            self.conv = _widened(self.conv, 2, self.num_before + capacity)
        self.kept = {name: _widened(tensor, 1, capacity) for name, tensor in self.kept.items()}


@dataclass(eq=False)
class StatesStep:
    """What the recurrent layers of one forward read and write: `rows` (r,), the leading ones if `is_leading`.

    A prefill starts from the states of its rows and replaces them by those after `lengths` (r,) tokens, all if None.
    A step of decoding first applies the `count` (r,) accepted of the first `num_replayed` kept inputs, then runs its
    nodes; behind `offset` > 0, the nodes follow the first `offset` nodes of the same step. `layer` is the running one.
    """

    states: RecurrentStates
    rows: Tensor
    is_leading: bool
    is_prefill: bool
    lengths: Tensor | None = None
    offset: int = 0
    num_replayed: int = 0
    count: Tensor | None = None
    layer: int = -1

    @property
    def memory(self) -> LayerStates:
        """The states of the running layer."""
        return self.states.layers[self.layer]

    def read(self, memory: Tensor) -> Tensor:
        """Return the entries (r, …) of the rows, as a view if they are the leading ones."""
        return memory[: self.rows.shape[0]] if self.is_leading else memory[self.rows.to(memory.device)]

    def write(self, memory: Tensor, values: Tensor) -> None:
        """Replace the entries of the rows by `values` (r, …)."""
        if self.is_leading:
            memory[: self.rows.shape[0]] = values
        else:
            memory[self.rows.to(memory.device)] = values

    def write_nodes(self, memory: Tensor, start: int, values: Tensor) -> None:
        """Write `values` (r, N, …) to the entries of the rows from node `start`."""
        self.write(memory[:, start : start + values.shape[1]], values)

    def is_real(self, num_tokens: int, device: torch.device) -> Tensor | None:
        """Return which tokens (r, N) of a prefill are no padding; None if all are."""
        if self.lengths is None:
            return None
        return torch.arange(num_tokens, device=device) < self.lengths.to(device)[:, None]

    def is_accepted(self, num_nodes: int, device: torch.device) -> Tensor:
        """Return which of the first `num_nodes` kept inputs (r, N) were accepted."""
        assert self.count is not None
        return torch.arange(num_nodes, device=device) < self.count.to(device)[:, None]


class RecurrentStates:
    """States of the recurrent layers `indices` of a decoder for `num_rows` rows; tensors are allocated at first use.

    `pending` (rows,) is the number of kept inputs that were accepted and are not applied to the states yet. `has_run`
    is whether a forward has run, after which no layer allocates tensors. `version` changes with the addresses of
    tensors.
    """

    def __init__(self, indices: Sequence[int], num_rows: int, num_slots: int, device: torch.device) -> None:
        self.layers = {index: LayerStates() for index in indices}
        self.num_rows = num_rows
        self.pending = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.has_run = False
        self.version = self.capacity = 0
        # Upper bounds of the kept inputs of each slot, after launched steps and after recorded ones.
        self._most_kept = [0] * num_slots
        self._most_recorded = 0

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors; their first axis is the row."""
        yield self.pending
        for layer in self.layers.values():
            yield from layer.tensors()

    def prefill_step(self, rows: Tensor, lengths: Sequence[int]) -> StatesStep:
        """Return the step of a prefill of prompts of `lengths`, padded on the right to the longest."""
        is_ragged = min(lengths) < max(lengths)
        given = torch.tensor(list(lengths), device=rows.device) if is_ragged else None
        return StatesStep(self, rows, is_leading=False, is_prefill=True, lengths=given)

    def decoding_step(
        self, slots: Sequence[int], rows: Tensor, is_leading: bool, offset: int, num_nodes: int
    ) -> StatesStep:
        """Return the step of `num_nodes` nodes behind `offset` nodes of the same step; accepted inputs are pending no
        more."""
        self.reserve(offset + num_nodes)
        most = max((self._most_kept[slot] for slot in slots), default=0)
        if is_in_whole_step() and (recorded := max(most, offset + num_nodes)) > self._most_recorded:
            self._most_recorded, self.version = recorded, self.version + 1
        step = StatesStep(self, rows, is_leading, is_prefill=False, offset=offset)
        if offset == 0:
            # Replays of recorded steps run no code here, and their number of kept inputs is fixed.
            step.num_replayed = max(most, self._most_recorded)
            step.count = step.read(self.pending).clone()
            step.write(self.pending, torch.zeros_like(step.count))
        for slot in slots:
            self._most_kept[slot] = offset + num_nodes
        return step

    def commit(self, rows: Tensor, count: Tensor) -> None:
        """Accept `count` (r,) more of the kept inputs of `rows` (r,)."""
        self.pending.index_add_(0, rows, count)

    def clear(self, slots: Sequence[int], rows: Tensor) -> None:
        """Set the states of the rows (r,) of `slots` to those before the first token."""
        for slot in slots:
            self._most_kept[slot] = 0
        for tensor in self.tensors():
            tensor[rows.to(tensor.device)] = tensor.new_zeros(())

    def copy(self, source: Tensor, rows: Tensor) -> None:
        """Copy the states of rows `source` (r,) to `rows` (r,)."""
        for tensor in self.tensors():
            tensor[rows.to(tensor.device)] = tensor[source.to(tensor.device)]

    def replay_key(self, slots: Sequence[int]) -> int | None:
        """Return the host state that the kernels of a recorded step of `slots` depend on; None if more inputs are kept
        than a recorded step replays."""
        most = max((self._most_kept[slot] for slot in slots), default=0)
        return None if 0 < self._most_recorded < most else self.version

    def num_bytes(self) -> dict[torch.device, int]:
        """Return the bytes of all states by device."""
        sizes: dict[torch.device, int] = {}
        for tensor in self.tensors():
            sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
        return sizes

    def conv_of(self, step: StatesStep, inputs: Tensor, num_before: int) -> Tensor:
        """Return the convolution inputs of the running layer, allocated for inputs (r, channels, N)."""
        layer = step.memory
        if layer.conv is None:
            layer.num_before = num_before
            layer.conv = self._made(inputs, (inputs.shape[1], num_before + self.capacity), inputs.dtype)
        return layer.conv

    def state_of(self, step: StatesStep, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the states (rows, *shape) of the running layer, on the device of `like`."""
        layer = step.memory
        if layer.state is None:
            layer.state = self._made(like, shape, torch.float32)
        return layer.state

    def keep(self, step: StatesStep, **inputs: Tensor) -> None:
        """Keep the inputs (r, N, …) of the nodes of the running layer by name."""
        kept = step.memory.kept
        for name, values in inputs.items():
            if name not in kept:
                kept[name] = self._made(values, (self.capacity, *values.shape[2:]), values.dtype)
            step.write_nodes(kept[name], step.offset, values)

    def _made(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.version += 1
        return like.new_zeros((self.num_rows, *shape), dtype=dtype)

    def reserve(self, num_nodes: int) -> None:
        """Make room for the inputs of `num_nodes` nodes."""
        if num_nodes > self.capacity:
            self.capacity = num_nodes
            self.version += 1
            for layer in self.layers.values():
                layer.widen(num_nodes)


def _widened(tensor: Tensor, axis: int, length: int) -> Tensor:
    """Return a copy with `length` entries along an axis; new ones are zero."""
    shape = list(tensor.shape)
    shape[axis] = length
    wider = tensor.new_zeros(shape)
    wider.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
    return wider
