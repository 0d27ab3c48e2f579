"""Run a target over whole training samples (teacher forcing) with the prefill of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.contract import TargetModel
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch
from models.kv.prefill_batching import stack


@dataclass(frozen=True)
class TrainingSample:
    """A prompt and its continuation in one `prefix` of L tokens; `wanted` (L,) bool, on the CPU, marks the tokens that
    a head learns to draft."""

    prefix: Prefix
    wanted: Tensor


@dataclass(frozen=True)
class States:
    """A batch of training samples after the target's forward, padded on the right.

    `tokens`, `visual` and `wanted` are (b, L). `received` (b, L, D) are the target's input embeddings and `hidden`
    (b, L, D) its last hidden states, both fp32. `lengths` are the unpadded lengths.
    """

    tokens: Tensor
    visual: Tensor
    received: Tensor
    hidden: Tensor
    wanted: Tensor
    lengths: tuple[int, ...]


def extend(prefix: Prefix, token_ids: Tensor, embeds: Tensor) -> Prefix:
    """Append `token_ids` (T,) with embeddings `embeds` (T, D) to a prompt, at the rotary positions of decoding."""
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
def make_training_sample(
    target: TargetModel, prompt: Prefix, continuation: Sequence[int], num_known: int = 0
) -> TrainingSample:
    """Create a sample of a prompt and its continuation, whose first `num_known` tokens are not learned."""
    token_ids = torch.tensor(continuation, dtype=torch.long, device=target.device)
    embeds = target.decoder.get_input_embeddings()(token_ids)  # type: ignore[operator]
    wanted = torch.zeros(prompt.length + len(continuation), dtype=torch.bool)
    wanted[prompt.length + num_known :] = True
    return TrainingSample(extend(prompt, token_ids, embeds), wanted)


@torch.no_grad()
def teach_states(target: TargetModel, training_samples: Sequence[TrainingSample]) -> States:
    """Run the target over a batch of whole training samples in one prefill."""
    prefixes = [sample.prefix for sample in training_samples]
    lengths = tuple(prefix.length for prefix in prefixes)
    index = torch.arange(len(prefixes), device=target.device)
    slots = SlotBatch(index, tuple(range(len(prefixes))), (0,) * len(prefixes))
    prefill = target.lanes(len(prefixes), 1, max(lengths)).admit(slots, [[prefix] for prefix in prefixes])
    return States(
        tokens=stack(prefix.token_ids for prefix in prefixes),
        visual=stack(prefix.visual for prefix in prefixes),
        received=stack(prefix.embeds for prefix in prefixes).float(),
        hidden=prefill.hidden[:, 0].float(),
        wanted=stack(sample.wanted for sample in training_samples).to(target.device),
        lengths=lengths,
    )
