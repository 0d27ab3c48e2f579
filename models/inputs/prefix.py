"""Capture prompts as the language model receives them: embeddings, positions, mask of visual tokens.

A prompt is captured at the input of the language model, so that no code per model family is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from models.backends.mask_rules import rules_of
from models.layer_inputs import KEYWORD, layer_inputs_of
from models.prompt_blocks import groups_of, masks_made


@dataclass(frozen=True)
class Prefix:
    """One lane's prompt: `token_ids` (L,), `embeds` (L, D), `positions` (L,) or (3, L), `visual` (L,) bool.

    `deepstack` holds the features (visual tokens, D) that some families add at their first layers. `padding` (L,) marks
    padding tokens, to which no other token attends. They are run, because a drafter may read their states, and are then
    removed from the KV cache.
    """

    token_ids: Tensor
    embeds: Tensor
    positions: Tensor
    visual: Tensor
    deepstack: tuple[Tensor, ...] = ()
    padding: Tensor | None = None
    num_padding: int = 0
    """Number of tokens that `padding` marks, kept on the host to avoid a device synchronization."""
    groups: Tensor | None = None
    """Blocks (L,) of tokens that read each other, such as those of an image: equal numbers in one block, and different
    ones in others and for other tokens. None without blocks."""
    layer_inputs: Tensor | None = None
    """Inputs (L, layers, P) of each layer, see `models.layer_inputs`; None if layers have none."""
    origin: Hashable = field(default=None, init=False, compare=False)
    """Prompts of one origin with equal leading tokens have equal leading positions; None if unknown or changed."""

    def of(self, origin: Hashable) -> Prefix:
        """Return a copy of this prompt with `origin` set."""
        known = replace(self)
        object.__setattr__(known, "origin", origin)
        return known

    def outline(self) -> Prefix:
        """Return a copy with empty embeddings (L, 0), no deepstack features and no inputs of layers."""
        return replace(self, embeds=self.embeds.new_empty(self.length, 0), deepstack=(), layer_inputs=None)

    def select(self, keep: Tensor | slice) -> Prefix:
        """Return the tokens that `keep` (L,) marks, with unchanged `deepstack`."""
        token_ids, embeds, visual = self.token_ids[keep], self.embeds[keep], self.visual[keep]
        changed = replace(self, token_ids=token_ids, embeds=embeds, positions=self.positions[..., keep], visual=visual)
        if self.groups is None and self.layer_inputs is None:
            return changed
        groups, inputs = (None if part is None else part[keep] for part in (self.groups, self.layer_inputs))
        return replace(changed, groups=groups, layer_inputs=inputs)

    def head(self, length: int) -> Prefix:
        """Return the first `length` tokens of a prompt without padding, which include all tokens of `deepstack`."""
        assert self.padding is None
        return self.select(slice(length))

    def tail(self, start: int) -> Prefix:
        """Return the tokens from `start` of a prompt without padding, which include no tokens of `deepstack` or of a
        block."""
        assert self.padding is None
        return replace(self.select(slice(start, None)), deepstack=(), groups=None)

    @property
    def length(self) -> int:
        """Number of tokens that are run, padding included."""
        return int(self.embeds.shape[0])

    @property
    def num_kept(self) -> int:
        """Number of tokens that stay in the KV cache."""
        return self.length - self.num_padding

    @property
    def next_position(self) -> Tensor:
        """Rotary position of the first generated token: one more than the last token's highest axis."""
        return self.positions[..., -1].max() + 1

    @property
    def axis_offsets(self) -> Tensor | None:
        """Offsets of three axes (3,) from `next_position`, which differ after a visual token; None for one axis."""
        if self.positions.dim() == 1:
            return None
        last = self.positions[:, -1]
        return last - last.max()

    @property
    def position_offset(self) -> Tensor:
        """Next rotary position minus `num_kept`, on the device."""
        return self.next_position - self.num_kept


def visual_runs(visual: Tensor) -> list[tuple[int, int]]:
    """Return start and end of every run of visual tokens in a mask (L,), after a device synchronization."""
    runs, start = [], 0
    for is_visual, group in groupby(visual.tolist()):
        end = start + len(list(group))
        if is_visual:
            runs.append((start, end))
        start = end
    return runs


class _ReachedDecoder(Exception):
    """Raised when the model reaches its decoder."""


def capture(model: nn.Module, decoder: nn.Module, inputs: dict[str, Tensor], visual_ids: frozenset[int]) -> Prefix:
    """Run the layers of `model` before `decoder` on one sample, and return the input of `decoder` as a prefix.

    `inputs` is the processor's output for one sample (batch axis of 1). `visual_ids` are the placeholder tokens that
    the family replaces by image or video features. Raises: UnknownMaskError if the model's masks are none that the
    rules of its layers make.
    """
    received: dict[str, Any] = {}
    thread = threading.get_ident()

    def record(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != thread:
            return  # a concurrent decoding step
        received.update(kwargs)
        raise _ReachedDecoder

    handle = decoder.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with masks_made(decoder):
            model(**inputs, use_cache=False)
    except _ReachedDecoder:
        pass
    finally:
        handle.remove()
    token_ids = inputs["input_ids"][0]
    embeds = received.get("inputs_embeds")
    if embeds is None:
        embeds = decoder.get_input_embeddings()(inputs["input_ids"])  # type: ignore[operator]
    positions = received.get("position_ids")
    if positions is None:
        positions = torch.arange(embeds.shape[1], device=embeds.device)
    else:
        # (1, L), (3, 1, L), or (4, 1, L) with the text positions first; the last three are the rotary axes.
        positions = positions.reshape(-1, embeds.shape[1])
        positions = positions[0] if positions.shape[0] == 1 else positions[-3:]
    visual = torch.isin(token_ids, torch.tensor(sorted(visual_ids), dtype=torch.long, device=token_ids.device))
    deepstack = received.get("deepstack_visual_embeds") or ()
    groups = groups_of(received.get("attention_mask"), rules_of(decoder))
    per_layer = received.get(KEYWORD)
    of_layers = layer_inputs_of(decoder, token_ids) if per_layer is None else per_layer[0]
    return Prefix(token_ids, embeds[0], positions, visual, tuple(deepstack), groups=groups, layer_inputs=of_layers)
