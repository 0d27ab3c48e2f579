"""Run a target over whole training samples (teacher forcing) with the prefill of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.contract import TargetModel
from models.inputs.prefix import Prefix
from models.kv.feature_layers import LAST
from models.kv.lanes import SlotBatch
from models.kv.prefill_batching import stack, stack_positions


@dataclass(frozen=True)
class TrainingSample:
    """A prompt and its continuation in one `prefix` of L tokens; `wanted` (L,) bool, on the CPU, marks the tokens that
    a head learns to draft."""

    prefix: Prefix
    wanted: Tensor


@dataclass(frozen=True)
class States:
    """A batch of training samples after the target's forward, padded on the right.

    `tokens`, `visual` and `wanted` are (b, L). `received` (b, L, D) are the target's input embeddings, `hidden`
    (b, L, D) its last hidden states and `features` (b, L, F) those of the feature layers, all fp32. `positions` are the
    rotary positions, (b, L) or (3, b, L). `lengths` are the unpadded lengths.
    """

    tokens: Tensor
    visual: Tensor
    received: Tensor
    hidden: Tensor
    features: Tensor
    positions: Tensor
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
def teach_states(
    target: TargetModel, training_samples: Sequence[TrainingSample], feature_layers: tuple[int, ...] = (LAST,)
) -> States:
    """Run the target over a batch of whole training samples in one prefill.

    `feature_layers` are as for `models.kv.lanes.LaneModel`.
    """
    prefixes = [sample.prefix for sample in training_samples]
    lengths = tuple(prefix.length for prefix in prefixes)
    index = torch.arange(len(prefixes), device=target.device)
    slots = SlotBatch(index, tuple(range(len(prefixes))), (0,) * len(prefixes))
    lanes = target.lanes(len(prefixes), 1, max(lengths), feature_layers)
    prefill = lanes.admit(slots, [[prefix] for prefix in prefixes])
    hidden = stack(prefill.states).float()
    return States(
        tokens=stack(prefix.token_ids for prefix in prefixes),
        visual=stack(prefix.visual for prefix in prefixes),
        received=stack(prefix.embeds for prefix in prefixes).float(),
        hidden=hidden,
        features=hidden if feature_layers == (LAST,) else stack(prefill.features).float(),
        positions=stack_positions(prefixes, max(lengths)),
        wanted=stack(sample.wanted for sample in training_samples).to(target.device),
        lengths=lengths,
    )
