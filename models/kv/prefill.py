"""Prefill prompts into the KV cache; equal prompts and common prefixes ("stems") are computed once.

Prompts with equal `origin` and equal leading tokens have equal leading KV positions. These are computed for one prompt
and copied to the rows of the others; the remaining tokens of all these prompts are then run in common forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from models.backends.attention import AttentionStep, DecoderRunner, mask_bias
from models.backends.attention_probe import AttentionProbe
from models.backends.base import Backend, TreeNodes
from models.backends.cache import RaggedCache
from models.backends.states.memory import StatesStep
from models.inputs.prefix import Prefix
from models.kv.prefill_batching import (
    MAX_MASK,
    Stem,
    find_stems,
    first_of_each,
    group_by_length,
    mask_padding,
    stack,
    stack_deepstack,
    stack_groups,
    stack_layer_inputs,
    stack_padding,
    stack_positions,
    text_after_images,
)


@dataclass(eq=False)
class PromptReader:
    """Prefills the cleared cache rows `_rows` (r,) with prompts.

    Results by index of the prompts that were run: `ends` (W,), the last state; `states` (L, W) of all tokens if
    `_keep_hidden`; `received` (L,), the mean attention to each token if `_probe_attention`. The inputs of the layers
    `_recorded` are appended to states, see `models.backends.attention.run_decoder`.
    """

    _run: DecoderRunner
    _backend: Backend
    _cache: RaggedCache
    _num_heads: int
    _rows: Tensor
    _probe_attention: bool
    _keep_hidden: bool
    _max_tokens: int | None
    _max_padding: int
    _recorded: Sequence[int] = ()
    num_forwards: int = 0
    ends: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)

    def read(self, prefixes: Sequence[Prefix]) -> list[int]:
        """Prefill every row with its prompt; returns for each row the index of the prompt whose results it shares."""
        source = first_of_each(prefixes)
        fresh = sorted(set(source))
        # Attention is averaged over queries of the whole prompt, so probed prompts are run whole.
        stems = [] if self._probe_attention else find_stems(prefixes, fresh)
        self._read_whole(prefixes, fresh, stems)
        if stems:
            self._follow(prefixes, stems)
        copies = [index for index, first in enumerate(source) if index != first]
        if copies:
            self._copy([source[index] for index in copies], copies, max(prefix.length for prefix in prefixes))
        return source

    def _read_whole(self, prefixes: Sequence[Prefix], fresh: Sequence[int], stems: Sequence[Stem]) -> None:
        """Run whole prompts, and each stem for the first prompt that has it."""
        heads = {stem.indices[0]: prefixes[stem.indices[0]].head(stem.length) for stem in stems}
        later = {index for stem in stems for index in stem.indices[1:]}
        indices = [index for index in fresh if index not in later]
        prompts = [heads.get(index, prefixes[index]) for index in indices]
        for group in group_by_length([prompt.length for prompt in prompts], self._max_tokens, self._max_padding):
            some = [prompts[i] for i in group]
            self._note([indices[i] for i in group], some, *self._run_whole(self._at(indices, group), some))

    def _follow(self, prefixes: Sequence[Prefix], stems: Sequence[Stem]) -> None:
        """Copy stems to the rows of all prompts that share them, and run the remaining tokens of these prompts."""
        firsts = [stem.indices[0] for stem in stems for _ in stem.indices[1:]]
        self._copy(firsts, [index for stem in stems for index in stem.indices[1:]], max(stem.length for stem in stems))
        starts = {index: stem.length for stem in stems for index in stem.indices}
        keeping = stems if self._keep_hidden else ()
        heads = {index: self.states[stem.indices[0]] for stem in keeping for index in stem.indices}
        indices = list(starts)
        rests = [prefixes[index].tail(starts[index]) for index in indices]
        # Unlike whole prompts, these forwards need a mask, whose size is bounded.
        widest = MAX_MASK // max(prefixes[index].length for index in indices)
        bound = widest if self._max_tokens is None else min(widest, self._max_tokens)
        for group in group_by_length([rest.length for rest in rests], bound, self._max_padding):
            some, behind = [rests[i] for i in group], [starts[indices[i]] for i in group]
            self._note([indices[i] for i in group], some, self._run_behind(self._at(indices, group), some, behind))
        for index, head in heads.items():
            self.states[index] = torch.cat([head, self.states[index]])

    def _run_whole(self, rows: Tensor, prefixes: Sequence[Prefix]) -> tuple[Tensor, Tensor | None]:
        """Run whole prompts in one forward into `rows` (r,); returns states (r, L, W), and the mean attention to each
        token (r, L) if it is probed."""
        longest = max(prefix.length for prefix in prefixes)
        embeds = stack(prefix.embeds for prefix in prefixes)
        padding = stack_padding(prefixes)
        assert padding is None or not self._probe_attention, "attention is not recorded over padded prompts"
        probe = AttentionProbe(text_after_images(prefixes)) if self._probe_attention else None
        mask = None if padding is None else mask_bias(mask_padding(padding), embeds.dtype)
        columns = torch.arange(longest, device=rows.device).repeat(len(prefixes), 1)
        groups = stack_groups(prefixes)
        states = self._states_of(rows, prefixes)
        assert states is None or padding is None, "recurrent layers read prompts without padding tokens"
        step = AttentionStep(self._cache, rows, columns, mask, longest, None, probe, states=states, groups=groups)
        extra: dict[str, Any] = stack_layer_inputs(self._run.decoder, prefixes)
        if any(prefix.deepstack for prefix in prefixes):
            extra["visual_pos_masks"] = stack(prefix.visual for prefix in prefixes)
            extra["deepstack_visual_embeds"] = stack_deepstack(prefixes)
        hidden = self._run(embeds, stack_positions(prefixes, longest), step, extra, self._recorded)
        self.num_forwards += 1
        if padding is not None:
            # Kept positions move to the front in order; later positions become scratch.
            num_kept = torch.tensor([prefix.num_kept for prefix in prefixes], device=rows.device)
            self._cache.compact(rows, padding.to(torch.uint8).argsort(dim=1, stable=True), num_kept)
        return hidden, None if probe is None else probe.mean()

    def _run_behind(self, rows: Tensor, rests: Sequence[Prefix], starts: Sequence[int]) -> Tensor:
        """Run the tokens after the first `starts` positions of `rows` (r,) in one forward; returns states (r, N, W)."""
        longest = max(rest.length for rest in rests)
        embeds = stack(rest.embeds for rest in rests)
        lens = torch.tensor(starts, device=rows.device)
        numbers = torch.arange(longest, device=rows.device)
        ends = [start + rest.length for start, rest in zip(starts, rests, strict=True)]
        is_real = numbers < (torch.tensor(ends, device=rows.device) - lens)[:, None, None]
        causal = (numbers[:, None] >= numbers) & is_real
        depth = numbers.expand(len(rests), -1)
        shape = (0, max(ends), self._num_heads, embeds.dtype)
        nodes = TreeNodes(
            self._cache, rows, lens, torch.zeros_like(lens), depth, causal, numbers, *shape, leading=False
        )
        step, _ = self._backend.place(nodes)
        step = replace(step, states=self._states_of(rows, rests))
        self.num_forwards += 1
        extra = stack_layer_inputs(self._run.decoder, rests)
        return self._run(embeds, stack_positions(rests, longest), step, extra, self._recorded)

    def _states_of(self, rows: Tensor, prefixes: Sequence[Prefix]) -> StatesStep | None:
        """Return what recurrent layers read and write for these prompts; None if there are none."""
        states = self._cache.states
        return None if states is None else states.prefill_step(rows, [prefix.length for prefix in prefixes])

    def _note(
        self, indices: Sequence[int], run: Sequence[Prefix], hidden: Tensor, received: Tensor | None = None
    ) -> None:
        """Store the results of one forward over the prompts `run`, by their `indices`."""
        last = torch.tensor([prefix.length - 1 for prefix in run], device=hidden.device)
        ends = hidden[torch.arange(len(run), device=hidden.device), last]
        for row, (index, prefix) in enumerate(zip(indices, run, strict=True)):
            self.ends[index] = ends[row]
            if self._keep_hidden:
                self.states[index] = hidden[row, : prefix.length]
            if received is not None:
                self.received[index] = received[row, : prefix.length]

    def _at(self, indices: Sequence[int], group: Sequence[int]) -> Tensor:
        """Return the rows of `indices[group]`, without a copy if these are all rows in order."""
        wanted = [indices[i] for i in group]
        if wanted == list(range(self._rows.shape[0])):
            return self._rows
        return self._rows[torch.tensor(wanted, device=self._rows.device)]

    def _copy(self, sources: Sequence[int], destinations: Sequence[int], num_columns: int) -> None:
        """Copy the first `num_columns` KV positions of the rows of prompts `sources` to those of `destinations`."""
        there, here = torch.tensor([list(sources), list(destinations)], device=self._rows.device)
        self._cache.copy(self._rows[there], self._rows[here], num_columns)
