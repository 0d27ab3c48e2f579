"""Batch prompts for prefill: find shared prompts and stems, group prompts by length, and stack them.

If several rows share a prompt, the same `Prefix` object is passed for each; it is run once and its positions copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from models.backends.base import MAX_PREFILL_PADDING
from models.inputs.prefix import Prefix
from models.layer_inputs import KEYWORD, layer_inputs_of
from models.prompt_blocks import end_of_blocks

MIN_SAVING = 256
"""Minimum number of tokens that a stem must save, because it takes one more forward."""
MAX_MASK = 2**24
"""Maximum number of elements of the attention mask of a forward that continues stems."""


@dataclass(frozen=True)
class Stem:
    """Common prefix of `length` tokens of the prompts at `indices`."""

    indices: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class Prefill:
    """Outputs of a prefill: `last` (b, R, D), the last state of each prompt, and the number of forwards.

    By row, slot-major, if requested: `states` (L, D) and `features` (L, F) of all positions, and `received` (L,), the
    mean attention that each position receives. States are post-norm; features are as in `LaneModel.split`.
    """

    last: Tensor
    num_forwards: int
    states: tuple[Tensor, ...] = ()
    features: tuple[Tensor, ...] = ()
    received: tuple[Tensor, ...] = ()

    @property
    def hidden(self) -> Tensor:
        """States of all positions (b, R, L, D), padded with zeros."""
        padded = stack(self.states)
        return padded.view(*self.last.shape[:2], *padded.shape[1:])

    def hidden_of(self, index: int) -> Tensor:
        """Return the states (R, L, D) of the sample `index`; its lanes must have prompts of equal length."""
        return self._of(self.states, index)

    def features_of(self, index: int) -> Tensor:
        """Return the features (R, L, F) of the sample `index`, as `hidden_of` does."""
        return self._of(self.features, index)

    def _of(self, by_row: Sequence[Tensor], index: int) -> Tensor:
        num_lanes = self.last.shape[1]
        lanes = by_row[index * num_lanes : (index + 1) * num_lanes]
        return lanes[0][None] if num_lanes == 1 else torch.stack(tuple(lanes))

    def attention_of(self, row: int) -> Tensor | None:
        """Return the mean attention (L,) to each position of a row; None if it was not probed."""
        return self.received[row] if self.received else None


def first_of_each(prefixes: Sequence[Prefix]) -> list[int]:
    """Return for every prompt the index of the first prompt that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(prefix), index) for index, prefix in enumerate(prefixes)]


def find_stems(prefixes: Sequence[Prefix], indices: Sequence[int]) -> list[Stem]:
    """Find stems among the prompts at `indices` that save more than the additional forward costs.

    The prompts of a stem have equal origins and leading tokens. A stem has at least half of the longest prompt's tokens
    and not all tokens of any prompt. Prompts with padding, or with deepstack features or blocks of tokens that end
    after the stem, have none.
    """
    kin: dict[Hashable, list[int]] = {}
    for index in indices:
        prefix = prefixes[index]
        if prefix.origin is not None and prefix.padding is None:
            kin.setdefault(prefix.origin, []).append(index)
    stems = []
    for some in kin.values():
        length = _common_length([prefixes[index] for index in some]) if len(some) > 1 else 0
        longest = max(prefixes[index].length for index in some)
        saves = (len(some) - 1) * length >= MIN_SAVING and length >= longest - length
        if saves and (longest - length) * longest <= MAX_MASK:
            stems.append(Stem(tuple(some), length))
    return stems


def _common_length(prefixes: Sequence[Prefix]) -> int:
    """Return the number of common leading tokens of prompts of one origin; 0 if deepstack features or parts of blocks
    of tokens follow them."""
    shortest = min(prefix.length for prefix in prefixes)
    tokens = torch.stack([prefix.token_ids[:shortest] for prefix in prefixes])
    numbers = [(tokens == tokens[0]).all(dim=0).long().cumprod(dim=0).sum()]
    if any(prefix.deepstack for prefix in prefixes):
        number = torch.arange(1, max(prefix.length for prefix in prefixes) + 1, device=tokens.device)
        numbers += [(prefix.visual * number[: prefix.length]).max() for prefix in prefixes]
    numbers += [end_of_blocks(prefix.groups) for prefix in prefixes if prefix.groups is not None]
    # One device synchronization.
    common, *ends = torch.stack(numbers).tolist()
    common = min(common, shortest - 1)
    return common if all(end <= common for end in ends) else 0


def group_by_length(
    lengths: Sequence[int], max_tokens: int | None, max_padding: int = MAX_PREFILL_PADDING
) -> list[list[int]]:
    """Group prompts into forwards by length, longest first; returns groups of indices, one if `max_tokens` is None.

    A group has at most `max_tokens` positions, padding included, unless it is a single prompt, and at most
    `max_padding` positions of padding.

        lengths 900, 10, 880, 12, bound 2,000  →  [0, 2] with 20 positions of padding, [3, 1] with 2
    """
    order = list(range(len(lengths)))
    if max_tokens is None:
        return [order]
    order.sort(key=lambda index: -lengths[index])
    groups: list[list[int]] = []
    num_padding = 0
    for index in order:
        if groups:
            longest, size = lengths[groups[-1][0]], len(groups[-1])
            num_padding += longest - lengths[index]
            if longest * (size + 1) <= max_tokens and num_padding <= max_padding:
                groups[-1].append(index)
                continue
        groups.append([index])
        num_padding = 0
    # A single group keeps the order of the prompts, so that rows need not be indexed.
    return [sorted(groups[0])] if len(groups) == 1 else groups


# --- prompts side by side ------------------------------------------------------------------------------------------


def stack(rows: Iterable[Tensor], padding: float = 0.0) -> Tensor:
    """Stack rows (L_i, …) to (r, L, …), padded on the right."""
    stacked: Tensor = pad_sequence(list(rows), batch_first=True, padding_value=padding)
    return stacked


def text_after_images(prefixes: Sequence[Prefix]) -> Tensor:
    """Return which tokens (r, L) are text after the last visual token; all tokens of prompts without images."""
    return stack(prefix.visual.flip(0).cumsum(0).flip(0) == 0 for prefix in prefixes)


def stack_padding(prefixes: Sequence[Prefix]) -> Tensor | None:
    """Return which tokens (r, L) are padding, right padding included; None if no prompt has padding tokens."""
    if all(prefix.padding is None for prefix in prefixes):
        return None
    marks = (torch.zeros_like(prefix.visual) if prefix.padding is None else prefix.padding for prefix in prefixes)
    return stack(marks, padding=True)


def mask_padding(padding: Tensor) -> Tensor:
    """Return a causal mask (r, 1, L, L) in which `padding` (r, L) tokens are visible to themselves only."""
    column = torch.arange(padding.shape[1], device=padding.device)
    causal = column[:, None] >= column
    return ((causal & ~padding[:, None]) | (column[:, None] == column))[:, None]


def stack_deepstack(prefixes: Sequence[Prefix]) -> list[Tensor]:
    """Concatenate the deepstack features of all rows: (visual tokens of all rows, D) for each of the first layers."""
    return [
        torch.cat(layer) for layer in zip(*(prefix.deepstack for prefix in prefixes if prefix.deepstack), strict=True)
    ]


def stack_groups(prefixes: Sequence[Prefix]) -> Tensor | None:
    """Stack the blocks of tokens to (r, L), see `LayerRule.prompt_mask`; None if no prompt has blocks.

    Padding is a block of its own, which follows all tokens.
    """
    if all(prefix.groups is None for prefix in prefixes):
        return None
    return stack(
        (
            torch.arange(prefix.length, device=prefix.embeds.device) if prefix.groups is None else prefix.groups
            for prefix in prefixes
        ),
        padding=-1,
    )


def stack_layer_inputs(decoder: nn.Module, prefixes: Sequence[Prefix]) -> dict[str, Tensor]:
    """Return the argument of the decoder with the inputs (r, L, layers, P) of its layers; none if layers have none."""
    parts = [
        layer_inputs_of(decoder, prefix.token_ids) if prefix.layer_inputs is None else prefix.layer_inputs
        for prefix in prefixes
    ]
    known = [part for part in parts if part is not None]
    return {KEYWORD: stack(known)} if known else {}


class Positioned(Protocol):
    """A prompt or a sample: `length` tokens with rotary `positions`, (L,) or (3, L)."""

    @property
    def length(self) -> int: ...

    @property
    def positions(self) -> Tensor: ...


def stack_positions(prefixes: Sequence[Positioned], length: int) -> Tensor:
    """Stack rotary positions to (r, L), or to (3, r, L) if any prefix has three rotary axes; padding is 0."""
    padded = [torch.nn.functional.pad(prefix.positions, (0, length - prefix.length)) for prefix in prefixes]
    if all(positions.dim() == 1 for positions in padded):
        return torch.stack(padded)
    return torch.stack([positions.expand(3, -1) for positions in padded], dim=1)
