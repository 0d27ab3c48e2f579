"""Run a language model over a KV cache in which each sample owns a slot of R rows: prefill, tree forwards, commits.

Target and drafter models both run here. Shapes: b active slots, R lanes, N nodes, D hidden, V vocabulary; r = b · R
rows, slot-major.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from models.backends.attention import DecoderRunner
from models.backends.base import TreeNodes
from models.backends.cache import RaggedCache
from models.backends.select import backend_for
from models.inputs.prefix import Prefix
from models.kv.feature_layers import LAST, FeatureLayers
from models.kv.prefill import PromptReader
from models.kv.prefill_batching import Prefill

NUM_AXES = 3
"""Rotary axes of multimodal models: time, height and width."""
WINDOW_STEP = 64
"""Attention windows are rounded up to a multiple of this many KV positions, so that few shapes occur."""


@dataclass(frozen=True)
class SlotBatch:
    """Active slots of one step, on the device and on the host.

    `index` (b,) and `ids` are the same slot numbers. `num_generated` counts the tokens of each slot so far, the pending
    one included; it bounds the length of every row without a device synchronization.
    """

    index: Tensor
    ids: tuple[int, ...]
    num_generated: tuple[int, ...]
    indexer: slice | Tensor = field(init=False)
    """Index of the slots in a per-slot tensor: a slice, which reads a view, if they are 0 … b − 1 in order."""

    def __post_init__(self) -> None:
        leading = range(len(self.ids))
        object.__setattr__(self, "indexer", slice(len(leading)) if self.ids == tuple(leading) else self.index)

    @property
    def are_leading(self) -> bool:
        """Whether the slots are 0 … b − 1 in order."""
        return isinstance(self.indexer, slice)

    def of(self, memory: Tensor) -> Tensor:
        """Return the entries (b, …) of these slots in a per-slot tensor (S, …), possibly as a view."""
        return memory[self.indexer]

    def put(self, memory: Tensor, values: Tensor) -> None:
        """Write `values` (b, …) to the entries of these slots in a per-slot tensor."""
        memory[self.indexer] = values

    def add(self, memory: Tensor, values: Tensor, sign: int = 1) -> None:
        """Add `sign` · `values` (b,) to the entries of these slots in a per-slot tensor."""
        if isinstance(self.indexer, slice):
            memory[self.indexer].add_(values, alpha=sign)
        else:
            memory.index_add_(0, self.index, values, alpha=sign)

    def some(self, ids: Collection[int]) -> SlotBatch:
        """Return the batch of the slots in `ids`, in the order of this batch."""
        if len(ids) == len(self.ids):
            return self
        indices = [index for index, slot in enumerate(self.ids) if slot in ids]
        return SlotBatch(
            self.index[torch.tensor(indices, dtype=torch.long, device=self.index.device)],
            tuple(self.ids[index] for index in indices),
            tuple(self.num_generated[index] for index in indices),
        )


class LaneModel:
    """A model with a KV cache for `num_slots` samples, each with `num_lanes` rows of `capacity` positions.

    The rows of a slot are one block. Slots that decode together are moved to the leading blocks, so that the cache is
    always read as a view; the block of a slot may change in `forward`. `run` runs the decoder; by default eagerly.
    `feature_layers` are the states that `split` returns as features, see `models.kv.feature_layers`.
    """

    def __init__(
        self,
        decoder: nn.Module,
        head: nn.Module,
        num_slots: int,
        num_lanes: int,
        capacity: int,
        run: DecoderRunner | None = None,
        feature_layers: Sequence[int] = (LAST,),
    ) -> None:
        self._run = run or DecoderRunner(decoder)
        self.decoder, self.head, self.num_lanes = decoder, head, num_lanes
        self.device = device = next(decoder.parameters()).device
        self.backend = backend_for(device)
        config: Any = decoder.config
        self._num_heads: int = config.num_attention_heads
        num_layers: int = config.num_hidden_layers
        self._features = FeatureLayers(feature_layers, num_layers)
        self.cache = RaggedCache(num_slots * num_lanes, capacity, num_layers, device)
        self.delta = torch.zeros(num_slots * num_lanes, dtype=torch.long, device=device)
        # Offsets of three rotary axes by row (rows, 3), added to positions; None until a prompt has three axes.
        self.axes: Tensor | None = None
        self._prefix_lengths = [0] * num_slots
        self._num_used_columns = 0
        # Scratch positions that other runners have written since the own one ran.
        self._num_temporary = 0
        # Maximum number of scratch positions that a forward has read.
        self._most_scratch = 0
        self._block_of = list(range(num_slots))
        self._blocks = torch.arange(num_slots, device=device)
        self._numbers = torch.arange(max(num_slots * num_lanes, capacity), device=device)

    def rows(self, slots: SlotBatch) -> Tensor:
        """Return the cache rows (b · R,) of `slots`, slot-major."""
        return self._rows_of(self._blocks[slots.index])

    def _rows_of(self, blocks: Tensor) -> Tensor:
        if self.num_lanes == 1:
            return blocks
        return (blocks[:, None] * self.num_lanes + self._numbers[: self.num_lanes]).flatten()

    def first_row_of(self, slot: int) -> int:
        """Return the first cache row of a slot, which is valid until the next `forward`."""
        return self._block_of[slot] * self.num_lanes

    def admit(
        self,
        slots: SlotBatch,
        prefixes: Sequence[Sequence[Prefix]],
        probe_attention: bool = False,
        keep_hidden: bool = True,
        max_tokens: int | None = None,
    ) -> Prefill:
        """Prefill new slots with the prompts `prefixes[i][lane]`; see `models.kv.prefill` for shared prompts.

        `probe_attention` records the attention that every position receives. `keep_hidden` returns the states and
        features of all positions as well as the last state. `max_tokens` bounds the tokens of one forward; see
        `models.kv.prefill_batching.group_by_length`.
        """
        flat = [prefix for lanes in prefixes for prefix in lanes]
        assert len(flat) == len(slots.ids) * self.num_lanes, (len(flat), len(slots.ids), self.num_lanes)
        longest = max(prefix.length for prefix in flat)
        assert longest <= self.cache.capacity, (longest, self.cache.capacity)
        rows = self.rows(slots)
        # A NaN of an earlier sample at a masked position makes attention outputs NaN: 0 · NaN is NaN.
        self.cache.wipe(rows, min(prefix.length for prefix in flat), self._num_used_columns)
        self._num_used_columns = max(self._num_used_columns, longest)
        limits = self.backend.prefill_limits(max_tokens)
        reader = PromptReader(
            self._run, self.cache, rows, probe_attention, keep_hidden, *limits, self._features.recorded
        )
        source = reader.read(flat)
        self.cache.lens[rows] = torch.tensor([prefix.num_kept for prefix in flat], device=self.device)
        self.delta[rows] = torch.stack([prefix.position_offset for prefix in flat])
        self._note_axes(rows, [prefix.axis_offsets for prefix in flat])
        for slot, lanes in zip(slots.ids, prefixes, strict=True):
            self._prefix_lengths[slot] = max(prefix.num_kept for prefix in lanes)
        ends = torch.stack([reader.ends[first] for first in source])
        # Split after the view: the output layer reads the result as one matrix, without copies of its weights.
        last, _ = self.split(ends.view(len(slots.ids), self.num_lanes, -1))
        states = {first: self.split(hidden) for first, hidden in reader.states.items()}
        return Prefill(
            last,
            reader.num_forwards,
            tuple(states[first][0] for first in source) if keep_hidden else (),
            tuple(states[first][1] for first in source) if keep_hidden else (),
            tuple(reader.received[first] for first in source) if probe_attention else (),
        )

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Split the states (…, W) of a forward into last hidden states (…, D) and features (…, F)."""
        return self._features.split(states)

    def empty(self, slots: SlotBatch) -> None:
        """Clear the slots, as after a prompt of length 0."""
        rows = self.rows(slots)
        self.cache.wipe(rows, 0, self._num_used_columns)
        self.delta[rows] = 0
        if self.axes is not None:
            self.axes[rows] = 0
        for slot in slots.ids:
            self._prefix_lengths[slot] = 0

    def _note_axes(self, rows: Tensor, offsets: Sequence[Tensor | None]) -> None:
        if self.axes is None and any(offset is not None for offset in offsets):
            self.axes = self.delta.new_zeros(self.delta.shape[0], NUM_AXES)
        if self.axes is not None:
            none = self.axes.new_zeros(NUM_AXES)
            self.axes[rows] = torch.stack([none if offset is None else offset for offset in offsets])

    def of_layers(self, indices: Sequence[int]) -> DecoderRunner:
        """Return a runner of only the layers `indices`, in ascending order, for `forward`."""
        return self._run.of_layers(indices)

    def forward(
        self,
        slots: SlotBatch,
        tokens: Tensor,
        depth: Tensor,
        visible: Tensor,
        offset: int = 0,
        other: DecoderRunner | None = None,
    ) -> Tensor:
        """Run N nodes of every slot: `tokens`, `depth` (b, N), `visible` (b, N, M) → states (b, R, N, W).

        Node i is written to scratch position `offset + i` and reads the committed positions and the scratch positions
        that `visible` marks. Its rotary position is the next position of the row plus `depth`. See `split` for states.
        `other` replaces the model's own runner, such as a result of `of_layers`; it returns no features, and its keys
        and values are temporary: the next forward of the own runner replaces or removes them.
        """
        embeds = self.decoder.get_input_embeddings()(self._spread(tokens))  # type: ignore[operator]
        return self.forward_embeds(slots, embeds, depth, visible, offset, other)

    def forward_embeds(
        self,
        slots: SlotBatch,
        embeds: Tensor,
        depth: Tensor,
        visible: Tensor,
        offset: int = 0,
        other: DecoderRunner | None = None,
    ) -> Tensor:
        """Run `forward` for nodes with input embeddings `embeds` (b · R, N, D), slot-major."""
        b, num_nodes = depth.shape
        is_mixed = self._lead(slots)
        visible, depth = self._spread(visible), self._spread(depth)
        if is_mixed:
            # Inputs are reordered from slot order to row order; outputs are reordered back.
            there = self._rows_of(self._blocks[slots.index].argsort())
            embeds, depth, visible = embeds[there], depth[there], visible[there]
        num_rows = b * self.num_lanes
        rows, lens = self._numbers[:num_rows], self.cache.lens[:num_rows]
        self._most_scratch = max(self._most_scratch, visible.shape[2])
        window = self._window(slots, visible.shape[2])
        delta, numbers = self.delta[:num_rows], self._numbers[offset : offset + num_nodes]
        options = (offset, window, self._num_heads, embeds.dtype)
        nodes = TreeNodes(self.cache, rows, lens, delta, depth, visible, numbers, *options)
        step, positions = self.backend.place(nodes)
        if self.axes is not None:
            positions = positions + self.axes[:num_rows].T[:, :, None]
        if other is not None:
            self._num_temporary = max(self._num_temporary, offset + num_nodes)
        elif self._num_temporary:
            # A NaN at a position that this forward does not write would spread; see `admit`.
            self.cache.wipe_scratch(num_rows, offset + num_nodes, self._num_temporary)
            self._num_temporary = 0
        recorded = self._features.recorded if other is None else ()
        states = (other or self._run)(embeds, positions, step, {}, recorded)
        states = states.view(b, self.num_lanes, num_nodes, -1)
        return states[self._blocks[slots.index]] if is_mixed else states

    def _window(self, slots: SlotBatch, num_scratch: int) -> int:
        """Return how many KV positions a forward reads at most, and count them as used."""
        needed = max(self._prefix_lengths[s] + n for s, n in zip(slots.ids, slots.num_generated, strict=True))
        window = min(-(-(needed + num_scratch) // WINDOW_STEP) * WINDOW_STEP, self.cache.capacity)
        self._num_used_columns = max(self._num_used_columns, window)
        return window

    @property
    def is_captured(self) -> bool:
        """Whether forwards are replayed as CUDA graphs."""
        return self._run.is_captured

    def prepare_replay(self, slots: SlotBatch) -> None:
        """Do what the forwards of a replayed step leave out: move the slots to the leading blocks, and count the KV
        positions that the step uses."""
        if self.cache.is_made:
            self._window(slots, self._most_scratch)
            self._lead(slots)

    def replay_key(self, slots: SlotBatch) -> Hashable | None:
        """Return the host state that the kernels of forwards and commits depend on after `prepare_replay`; None if they
        depend on the lengths of rows."""
        if not self.cache.is_made or self.backend.reads_windows(self.cache):
            return None
        return self._are_leading(slots), self.axes is None, self._num_temporary

    def _lead(self, slots: SlotBatch) -> bool:
        """Move the slots to the leading blocks; returns whether their order there differs from the batch."""
        b = len(slots.ids)
        holes = set(range(b)) - {self._block_of[slot] for slot in slots.ids}
        if holes:
            holder = {block: slot for slot, block in enumerate(self._block_of)}
            for slot in slots.ids:
                if self._block_of[slot] >= b:
                    self._swap(slot, holder[holes.pop()])
        return not self._are_leading(slots)

    def _are_leading(self, slots: SlotBatch) -> bool:
        """Return whether the block of each slot equals its index in the batch."""
        return all(self._block_of[slot] == index for index, slot in enumerate(slots.ids))

    def _swap(self, first: int, second: int) -> None:
        """Swap the blocks of two slots, KV cache rows and per-row state included."""
        starts = (self.first_row_of(slot) for slot in (first, second))
        here, there = (slice(start, start + self.num_lanes) for start in starts)
        for memory in (*self.cache.keys, *self.cache.values, self.cache.lens, self.delta, self.axes):
            if memory is not None:
                saved = memory[here].clone()
                memory[here] = memory[there]
                memory[there] = saved
        self._block_of[first], self._block_of[second] = self._block_of[second], self._block_of[first]
        for slot in (first, second):
            # `fill_` passes the number to the kernel; an assignment would copy it from the host and wait.
            self._blocks[slot].fill_(self._block_of[slot])

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits (…, V) in fp32 of hidden states (…, D)."""
        out: Tensor = self.head(hidden)
        return out.float()

    def commit(self, slots: SlotBatch, source: Tensor, keep: Tensor) -> None:
        """Commit the first `keep` (b,) of scratch positions `source` (b, P) of each row, moved to its next positions.

        If P is 0, the first `keep` scratch positions are committed without a move.
        """
        if source.shape[1] == 0 and self._are_leading(slots):
            keep = self._spread(keep)
            self.cache.lens[: keep.shape[0]].add_(keep)
            return
        rows = self.rows(slots)
        source, keep = self._spread(source), self._spread(keep)
        self.cache.compact(rows, source, keep)
        self.cache.advance(rows, keep)

    def _spread(self, values: Tensor) -> Tensor:
        """Repeat values of slots (b, …) for their rows (b · R, …)."""
        return values if self.num_lanes == 1 else values.repeat_interleave(self.num_lanes, dim=0)
