"""Capture prompts as the language model receives them: embeddings, positions, mask of visual tokens.

A prompt is captured at the input of the language model, so that no code per model family is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn


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
    origin: Hashable = field(default=None, init=False, compare=False)
    """Prompts of one origin with equal leading tokens have equal leading positions. None if unknown.
    `dataclasses.replace` does not copy it, because a changed prompt has another origin."""

    def of(self, origin: Hashable) -> Prefix:
        """Return a copy of this prompt with `origin` set."""
        known = replace(self)
        object.__setattr__(known, "origin", origin)
        return known

    def outline(self) -> Prefix:
        """Return a copy with empty embeddings (L, 0) and no deepstack features."""
        return replace(self, embeds=self.embeds.new_empty(self.length, 0), deepstack=())

    def select(self, keep: Tensor) -> Prefix:
        """Return the tokens that `keep` (L,) marks, with unchanged `deepstack`."""
        return replace(
            self,
            token_ids=self.token_ids[keep],
            embeds=self.embeds[keep],
            positions=self.positions[..., keep],
            visual=self.visual[keep],
        )

    def head(self, length: int) -> Prefix:
        """Return the first `length` tokens of a prompt without padding, which include all tokens of `deepstack`."""
        assert self.padding is None
        positions = self.positions[..., :length]
        return Prefix(self.token_ids[:length], self.embeds[:length], positions, self.visual[:length], self.deepstack)

    def tail(self, start: int) -> Prefix:
        """Return the tokens from `start` of a prompt without padding, which include no tokens of `deepstack`."""
        assert self.padding is None
        return Prefix(self.token_ids[start:], self.embeds[start:], self.positions[..., start:], self.visual[start:])

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
        """Rotary position of the first generated token, as in `generate`: one more than the highest axis of the last
        token's position."""
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


class _ReachedDecoder(Exception):
    """Raised when the model reaches its decoder."""


def capture(model: nn.Module, decoder: nn.Module, inputs: dict[str, Tensor], visual_ids: frozenset[int]) -> Prefix:
    """Run the layers of `model` before `decoder` on one sample, and return the input of `decoder` as a prefix.

    `inputs` is the processor's output for one sample (batch axis of 1). `visual_ids` are the placeholder tokens that
    the family replaces by image or video features.
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
        model(**inputs, use_cache=False)
    except _ReachedDecoder:
        pass
    finally:
        handle.remove()
    token_ids = inputs["input_ids"][0]
    embeds = received.get("inputs_embeds")
    if embeds is None:
        embeds = decoder.get_input_embeddings()(inputs["input_ids"])  # type: ignore[operator]
    length = embeds.shape[1]
    positions = received.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=embeds.device)
    else:
        # (1, L), (3, 1, L), or (4, 1, L) with the text positions first; the last three are the rotary axes.
        positions = positions.reshape(-1, length)
        positions = positions[0] if positions.shape[0] == 1 else positions[-3:]
    visual = torch.zeros(length, dtype=torch.bool, device=embeds.device)
    for token_id in visual_ids:
        visual |= token_ids == token_id
    deepstack = received.get("deepstack_visual_embeds") or ()
    return Prefix(token_ids, embeds[0], positions, visual, tuple(deepstack))
