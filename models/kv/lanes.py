"""Run a language model over a KV cache in which each sample owns a slot of R rows: prefill, tree forwards, commits.

Target and drafter models both run here. Shapes: b active slots, R lanes, N nodes, D hidden, V vocabulary; r = b · R
rows, slot-major.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from models.backends.attention import AttentionStep, DecoderRunner
from models.backends.base import TreeNodes
from models.backends.cache import RaggedCache
from models.backends.mask_rules import rules_of
from models.backends.pages import PagedCache
from models.backends.rows import SlotRows
from models.backends.select import backend_for
from models.backends.states.layers import install, recurrent_layers
from models.backends.states.memory import RecurrentStates
from models.inputs.prefix import Prefix
from models.kv.feature_layers import LAST, FeatureLayers
from models.kv.prefill import PromptReader
from models.kv.prefill_batching import Prefill
from models.layer_inputs import KEYWORD, layer_inputs_of


@dataclass(frozen=True)
class SlotBatch:
    """Slots of one step, on the device and on the host.

    `index` (b,) are slot numbers: the active slots, whose numbers are `ids`, then spare slots, which are free. A step
    of recorded kernels has spare slots, because it runs at fixed sizes; it computes results for them that nothing
    reads. `is_active` (b,) marks the active slots on the device; None if there are no spare ones. `num_generated`
    counts the tokens of each active slot so far, the pending one included; it bounds the length of every row without a
    device synchronization.
    """

    index: Tensor
    ids: tuple[int, ...]
    num_generated: tuple[int, ...]
    is_active: Tensor | None = None

    def of(self, memory: Tensor) -> Tensor:
        """Return the entries (b, …) of these slots in a per-slot tensor (S, …)."""
        return memory[self.index]

    def put(self, memory: Tensor, values: Tensor) -> None:
        """Write `values` (b, …) to the entries of these slots in a per-slot tensor."""
        memory[self.index] = values

    def add(self, memory: Tensor, values: Tensor, sign: int = 1) -> None:
        """Add `sign` · `values` (b,) to the entries of the active slots in a per-slot tensor."""
        memory.index_add_(0, self.index, self.counted(values), alpha=sign)

    def counted(self, values: Tensor) -> Tensor:
        """Return `values` (b, …) with zeros for spare slots, whose lengths must not grow."""
        if self.is_active is None:
            return values
        return values * self.is_active.view(-1, *[1] * (values.dim() - 1))

    def some(self, ids: Collection[int]) -> SlotBatch:
        """Return the batch of the slots in `ids`, in the order of this batch, without spare slots."""
        if len(ids) == self.index.shape[0]:
            return self
        indices = [index for index, slot in enumerate(self.ids) if slot in ids]
        return SlotBatch(
            self.index[torch.tensor(indices, dtype=torch.long, device=self.index.device)],
            tuple(self.ids[index] for index in indices),
            tuple(self.num_generated[index] for index in indices),
        )


class LaneModel:
    """A model with a KV cache for `num_slots` samples, each with `num_lanes` rows of `capacity` positions.

    With `num_pages`, rows hold pages, which `rows.take` reserves; the backend must read rows by number. `run` runs the
    decoder; by default eagerly. `feature_layers` are the states that `split` returns as features, see
    `models.kv.feature_layers`.
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
        num_pages: int | None = None,
    ) -> None:
        self._run = run or DecoderRunner(decoder)
        self.decoder, self.head, self.num_lanes = decoder, head, num_lanes
        self.device = device = next(decoder.parameters()).device
        self.backend = backend_for(device)
        config: Any = decoder.config
        self._num_heads: int = config.num_attention_heads
        num_layers: int = config.num_hidden_layers
        self._features = FeatureLayers(feature_layers, num_layers)
        shape = num_slots * num_lanes, capacity, num_layers, device
        self.cache = RaggedCache(*shape) if num_pages is None else PagedCache(*shape, num_pages)
        self.cache.rules = rules_of(decoder)
        if recurrent := recurrent_layers(decoder):
            install(decoder)
            self.cache.states = RecurrentStates(tuple(recurrent), self.cache.num_rows, num_slots, device)
        self.rows = SlotRows(self.cache, num_slots, num_lanes, self.backend)
        # Scratch positions that other runners have written since the own one ran.
        self._num_temporary = 0
        self._numbers = torch.arange(capacity, device=device)

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
        rows = self.rows.clear(slots, min(prefix.length for prefix in flat), longest)
        limits = self.backend.prefill_limits(max_tokens)
        reader = PromptReader(
            self._run,
            self.backend,
            self.cache,
            self._num_heads,
            rows,
            probe_attention,
            keep_hidden,
            *limits,
            self._features.recorded,
        )
        source = reader.read(flat)
        if self.cache.states is not None:
            self.cache.states.has_run = True
        lens, delta = [prefix.num_kept for prefix in flat], [prefix.position_offset for prefix in flat]
        self.rows.fill(slots, lens, delta, [prefix.axis_offsets for prefix in flat])
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

    def allocate(self, embeds: Tensor | None = None) -> None:
        """Allocate the KV cache, and offsets of three rotary axes if the model has them, before the first prompt.

        `embeds` (1, 1, D) is an input embedding, if its size is not the hidden size.
        """
        config: Any = self.decoder.config
        rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if "mrope_section" in rotary:
            self.rows.make_axes()
        if not self.cache.is_made:
            if embeds is None:
                embeds = next(self.decoder.parameters()).new_zeros(1, 1, config.hidden_size)
            nothing = torch.zeros_like(self._numbers[:1])[None]
            # Nothing reads the position at index `capacity`.
            states = self.cache.states
            of_states = None if states is None else states.decoding_step((), nothing[0], True, 0, 1)
            step = AttentionStep(
                self.cache, nothing[0], nothing + self.cache.capacity, None, 1, None, states=of_states
            )
            self._run(embeds, nothing, step, self._extra(nothing))
            if states is not None:
                states.has_run = True

    def check_siblings(self, most: int | None, name: str) -> None:
        """Raise ValueError if the model has recurrent layers and a node of a tree may have `most` children, None if
        that is unknown: their states follow one path."""
        if self.cache.states is not None and most != 1:
            raise ValueError(f"{name} has recurrent layers, whose states follow one path; use the tree 'chain'")

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Split the states (…, W) of a forward into last hidden states (…, D) and features (…, F)."""
        return self._features.split(states)

    def empty(self, slots: SlotBatch) -> None:
        """Clear the slots, as after a prompt of length 0."""
        self.rows.empty(slots)

    def of_layers(self, indices: Sequence[int]) -> DecoderRunner:
        """Return a runner of only the layers `indices`, in ascending order, for `forward`.

        Raises ValueError for a model with recurrent layers, whose states a forward of other layers would change.
        """
        if self.cache.states is not None:
            raise ValueError("a model with recurrent layers does not draft with a part of its layers")
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
        spread = self.rows.spread(tokens)
        embeds = self.decoder.get_input_embeddings()(spread)  # type: ignore[operator]
        return self.forward_embeds(slots, embeds, depth, visible, offset, other, self._extra(spread))

    def forward_embeds(
        self,
        slots: SlotBatch,
        embeds: Tensor,
        depth: Tensor,
        visible: Tensor,
        offset: int = 0,
        other: DecoderRunner | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Run `forward` for nodes with input embeddings `embeds` (b · R, N, D), slot-major.

        `extra` are further arguments (b · R, N, …) of the decoder.
        """
        extra = extra or {}
        b, num_nodes = depth.shape
        read = self.rows.gather(slots, visible.shape[2])
        visible, depth = self.rows.spread(visible), self.rows.spread(depth)
        if read.there is not None:
            # Inputs are reordered from slot order to row order; outputs are reordered back.
            embeds, depth, visible = embeds[read.there], depth[read.there], visible[read.there]
            extra = {name: value[read.there] for name, value in extra.items()}
        numbers = self._numbers[offset : offset + num_nodes]
        options = (offset, read.window, self._num_heads, embeds.dtype)
        nodes = TreeNodes(self.cache, read.rows, read.lens, read.delta, depth, visible, numbers, *options)
        step, positions = self.backend.place(nodes)
        if (recurrent := self.cache.states) is not None:
            is_leading = not self.rows.are_indexed
            step = replace(step, states=recurrent.decoding_step(slots.ids, read.rows, is_leading, offset, num_nodes))
        if read.axes is not None:
            positions = positions + read.axes.T[:, :, None]
        if other is not None:
            self._num_temporary = max(self._num_temporary, offset + num_nodes)
        elif self._num_temporary:
            # A NaN at a position that this forward does not write would spread; see `SlotRows.clear`.
            self.cache.zero_scratch(read.rows, read.lens, offset + num_nodes, self._num_temporary)
            self._num_temporary = 0
        recorded = self._features.recorded if other is None else ()
        states = (other or self._run)(embeds, positions, step, dict(extra), recorded)
        states = states.view(b, self.num_lanes, num_nodes, -1)
        return states if read.back is None else states[read.back]

    def _extra(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the decoder that depend on the tokens (r, N) besides their embeddings."""
        inputs = layer_inputs_of(self.decoder, tokens)
        return {} if inputs is None else {KEYWORD: inputs}

    @property
    def is_captured(self) -> bool:
        """Whether forwards are replayed as CUDA graphs."""
        return self._run.is_captured

    def replay_key(self, slots: SlotBatch) -> Hashable | None:
        """Return the host state that the kernels of forwards and commits of `slots` depend on; None if they depend on
        the lengths of rows."""
        if not (self.cache.is_made and self.rows.are_indexed):
            return None
        if (states := self.cache.states) is None:
            return self.rows.axes is None, self._num_temporary
        key = states.replay_key(slots.ids)
        return None if key is None else (self.rows.axes is None, self._num_temporary, key)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits (…, V) in fp32 of hidden states (…, D)."""
        out: Tensor = self.head(hidden)
        return out.float()

    def commit(self, slots: SlotBatch, source: Tensor, keep: Tensor) -> None:
        """Commit the first `keep` (b,) of scratch positions `source` (b, P) of each row, moved to its next positions.

        If P is 0, the first `keep` scratch positions are committed without a move.
        """
        self.rows.commit(slots, source, keep)
