"""Batching of prompts: which of them are run together, and the outputs of their prefill.

A prompt that several rows share is one `Prefix`, passed once per row: it is run once and its positions are copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.backends.base import MAX_PREFILL_PADDING
from models.inputs.prefix import Prefix

MIN_SAVING = 256
"""Columns that must be saved for prompts to be run behind a stem, which takes one more forward."""
MAX_MASK = 2**24
"""Most entries of a forward's mask where prompts are run behind their stems."""


@dataclass(frozen=True)
class Stem:
    """Prompts, by their places, that begin with the same `length` columns."""

    places: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class Prefill:
    """Outputs of a prefill: `last` (b, R, D) states at each prompt's end, and the number of forwards.

    By row, slot-major, if requested: `states` (L, D) of all positions and `received` (L,), the mean attention that each
    position receives. States are post-norm.
    """

    last: Tensor
    num_forwards: int
    states: tuple[Tensor, ...] = ()
    received: tuple[Tensor, ...] = ()

    @property
    def hidden(self) -> Tensor:
        """All states (b, R, L, D), padded."""
        padded = stack(self.states)
        return padded.view(*self.last.shape[:2], *padded.shape[1:])

    def hidden_of(self, place: int) -> Tensor:
        """The states (R, L, D) of one sample, whose lanes have prompts of one length."""
        num_lanes = self.last.shape[1]
        lanes = self.states[place * num_lanes : (place + 1) * num_lanes]
        return lanes[0][None] if num_lanes == 1 else torch.stack(lanes)

    def attention_of(self, row: int) -> Tensor | None:
        """What each column of one row's prompt receives."""
        return self.received[row] if self.received else None


def first_of_each(prefixes: Sequence[Prefix]) -> list[int]:
    """For every prompt the place of the first that is the very same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(prefix), place) for place, prefix in enumerate(prefixes)]


def find_stems(prefixes: Sequence[Prefix], places: Sequence[int]) -> list[Stem]:
    """Which prompts at `places` begin with the same columns, where running these once pays for one more forward.

    They have one origin and the same first tokens, at least half of the longest's and not all of any. Prompts with
    padding, or with deepstack features behind the stem, are run whole.
    """
    kin: dict[Hashable, list[int]] = {}
    for place in places:
        prefix = prefixes[place]
        if prefix.origin is not None and prefix.padding is None:
            kin.setdefault(prefix.origin, []).append(place)
    stems = []
    for some in kin.values():
        length = _common_length([prefixes[place] for place in some]) if len(some) > 1 else 0
        longest = max(prefixes[place].length for place in some)
        saves = (len(some) - 1) * length >= MIN_SAVING and length >= longest - length
        if saves and (longest - length) * longest <= MAX_MASK:
            stems.append(Stem(tuple(some), length))
    return stems


def _common_length(prefixes: Sequence[Prefix]) -> int:
    """Columns that all of these prompts of one origin begin with; 0 where features of layers come later."""
    shortest = min(prefix.length for prefix in prefixes)
    tokens = torch.stack([prefix.token_ids[:shortest] for prefix in prefixes])
    numbers = [(tokens == tokens[0]).all(dim=0).long().cumprod(dim=0).sum()]
    if any(prefix.deepstack for prefix in prefixes):
        numbers += [
            (prefix.visual * torch.arange(1, prefix.length + 1, device=tokens.device)).max() for prefix in prefixes
        ]
    # One look at the device.
    common, *ends = torch.stack(numbers).tolist()
    common = min(common, shortest - 1)
    return common if all(end <= common for end in ends) else 0


def group_by_length(
    lengths: Sequence[int], max_tokens: int | None, max_padding: int = MAX_PREFILL_PADDING
) -> list[list[int]]:
    """Places of prompts that are run together, the longest first; every place once, and without a bound all at once.

    A group holds at most `max_tokens` columns, padding included, unless it is one prompt alone; and one that would have
    more than `max_padding` columns of padding is left to two.

        lengths 900, 10, 880, 12, bound 2,000  →  [0, 2] with 20 columns of padding, [3, 1] with 2
    """
    order = list(range(len(lengths)))
    if max_tokens is None:
        return [order]
    order.sort(key=lambda place: -lengths[place])
    groups: list[list[int]] = []
    num_padding = 0
    for place in order:
        if groups:
            longest, size = lengths[groups[-1][0]], len(groups[-1])
            num_padding += longest - lengths[place]
            if longest * (size + 1) <= max_tokens and num_padding <= max_padding:
                groups[-1].append(place)
                continue
        groups.append([place])
        num_padding = 0
    # What fits into one forward keeps its order, so that rows need not be picked out.
    return [sorted(groups[0])] if len(groups) == 1 else groups


# --- prompts side by side ------------------------------------------------------------------------------------------


def stack(rows: Iterable[Tensor], padding: float = 0.0) -> Tensor:
    """Rows (L_i, …) of prompts → (r, L, …), padded on the right."""
    stacked: Tensor = pad_sequence(list(rows), batch_first=True, padding_value=padding)
    return stacked


def text_after_images(prefixes: Sequence[Prefix]) -> Tensor:
    """Columns (r, L) of the text that follows the last visual column; the whole text without images."""
    return stack(prefix.visual.flip(0).cumsum(0).flip(0) == 0 for prefix in prefixes)


def stack_padding(prefixes: Sequence[Prefix]) -> Tensor | None:
    """Columns (r, L) that leave the memory after the prefill, those beyond a prompt's end included; None for none."""
    if all(prefix.padding is None for prefix in prefixes):
        return None
    nothing = [torch.zeros_like(prefix.visual) for prefix in prefixes]
    marks = (none if one.padding is None else one.padding for one, none in zip(prefixes, nothing, strict=True))
    return stack(marks, padding=True)


def mask_padding(padding: Tensor) -> Tensor:
    """A causal mask (r, 1, L, L) in which only `padding` tokens themselves attend to `padding` (r, L)."""
    column = torch.arange(padding.shape[1], device=padding.device)
    causal = column[:, None] >= column
    return ((causal & ~padding[:, None]) | (column[:, None] == column))[:, None]


def stack_deepstack(prefixes: Sequence[Prefix]) -> list[Tensor]:
    """Features (visual columns of all rows, D) for each of the first layers, row after row; text rows have none."""
    layers = zip(*(prefix.deepstack for prefix in prefixes if prefix.deepstack), strict=True)
    return [torch.cat(features) for features in layers]


def stack_positions(prefixes: Sequence[Prefix], length: int) -> Tensor:
    """Positions (r, L), or (3, r, L) as soon as one prefix has three rotary axes; padding is 0."""
    num_axes = max(prefix.positions.dim() for prefix in prefixes)
    padded = [torch.nn.functional.pad(prefix.positions, (0, length - prefix.length)) for prefix in prefixes]
    if num_axes == 1:
        return torch.stack(padded)
    return torch.stack([positions.expand(3, -1) for positions in padded], dim=1)
