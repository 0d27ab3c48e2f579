"""Teacher forcing: whole training samples run through a target by the prefill of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.contract import TargetModel
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch


@dataclass(frozen=True)
class Lesson:
    """A prompt with its continuation, in one `prefix` of L positions; `wanted` (L,) bool, on the CPU, marks the tokens
    that a head must learn to draft."""

    prefix: Prefix
    wanted: Tensor


@dataclass(frozen=True)
class States:
    """A batch of training samples after the target's forward, padded on the right.

    `tokens`, `visual` and `wanted` are (b, L); `received` (b, L, D) are the target's inputs and `hidden` (b, L, D) its
    last states, both fp32; `lengths` are those of the rows.
    """

    tokens: Tensor
    visual: Tensor
    received: Tensor
    hidden: Tensor
    wanted: Tensor
    lengths: tuple[int, ...]


def extend(prefix: Prefix, token_ids: Tensor, embeds: Tensor) -> Prefix:
    """A prompt followed by `token_ids` (T,) with their `embeds` (T, D), at the positions of decoding."""
    later = prefix.next_position + torch.arange(token_ids.shape[0], device=prefix.positions.device)
    axes, nothing = prefix.axis_offsets, torch.zeros_like(later, dtype=torch.bool)
    return replace(
        prefix,
        token_ids=torch.cat([prefix.token_ids, token_ids]),
        embeds=torch.cat([prefix.embeds, embeds.to(prefix.embeds.dtype)]),
        positions=torch.cat([prefix.positions, later if axes is None else later + axes[:, None]], dim=-1),
        visual=torch.cat([prefix.visual, nothing]),
        padding=None if prefix.padding is None else torch.cat([prefix.padding, nothing]),
    )


@torch.no_grad()
def make_lesson(target: TargetModel, prompt: Prefix, said: Sequence[int], num_known: int = 0) -> Lesson:
    """A prompt and its continuation, of which the first `num_known` tokens need not be drafted."""
    token_ids = torch.tensor(said, dtype=torch.long, device=target.device)
    embeds = target.decoder.get_input_embeddings()(token_ids)  # type: ignore[operator]
    wanted = torch.zeros(prompt.length + len(said), dtype=torch.bool)
    wanted[prompt.length + num_known :] = True
    return Lesson(extend(prompt, token_ids, embeds), wanted)


@torch.no_grad()
def teach_states(target: TargetModel, lessons: Sequence[Lesson]) -> States:
    """Run the target over whole training samples."""
    lengths = tuple(lesson.prefix.length for lesson in lessons)
    index = torch.arange(len(lessons), device=target.device)
    slots = SlotBatch(index, tuple(range(len(lessons))), (0,) * len(lessons))
    lanes = target.lanes(len(lessons), 1, max(lengths))
    hidden = lanes.admit(slots, [[lesson.prefix] for lesson in lessons]).hidden[:, 0]
    prefixes = [lesson.prefix for lesson in lessons]
    return States(
        tokens=pad_sequence([prefix.token_ids for prefix in prefixes], batch_first=True),
        visual=pad_sequence([prefix.visual for prefix in prefixes], batch_first=True),
        received=pad_sequence([prefix.embeds for prefix in prefixes], batch_first=True).float(),
        hidden=hidden.float(),
        wanted=pad_sequence([lesson.wanted for lesson in lessons], batch_first=True).to(target.device),
        lengths=lengths,
    )
