"""Run a target over whole training samples (teacher forcing) with the prefill of decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from models.contract import TargetModel
from models.inputs.prefix import Prefix
from models.kv.feature_layers import LAST
from models.kv.lanes import SlotBatch
from models.kv.prefill_batching import stack, stack_positions
from models.layer_inputs import layer_inputs_of


@dataclass(frozen=True)
class TrainingSample:
    """A prompt and its continuation in one `prefix` of L tokens; `wanted` (L,) bool, on the CPU, marks the tokens that
    a head learns to draft."""

    prefix: Prefix
    wanted: Tensor

    @property
    def length(self) -> int:
        return self.prefix.length


@dataclass(frozen=True)
class RowStates:
    """One training sample of L tokens after the target's forward, without padding; all that a head's loss reads.

    `tokens`, `visual` and `wanted` are (L,). `received` (visual tokens, D) are the target's input embeddings of the
    tokens marked `visual`. `hidden` (L, D) are the last hidden states; `features` (L, F) are the states of the feature
    layers, None if these are `hidden`. `positions` are the rotary positions, (L,) or (3, L).
    """

    tokens: Tensor
    visual: Tensor
    received: Tensor
    hidden: Tensor
    features: Tensor | None
    positions: Tensor
    wanted: Tensor

    @property
    def length(self) -> int:
        return int(self.tokens.shape[0])

    def map(self, function: Callable[[Tensor], Tensor]) -> RowStates:
        """Return these states with `function` applied to each tensor."""
        changed: dict[str, Any] = {name: function(value) for name, value in self.tensors().items()}
        return replace(self, **changed)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field name."""
        return {name: value for name, value in vars(self).items() if value is not None}


Sample = TrainingSample | RowStates
"""A training sample before or after the target's forward."""


@dataclass(frozen=True)
class States:
    """A batch of training samples after the target's forward, padded on the right.

    `tokens`, `visual` and `wanted` are (b, L). `received` (b, L, D) are the target's input embeddings of visual tokens,
    0 for others. `hidden` (b, L, D) are the last hidden states and `features` (b, L, F) those of the feature layers,
    all fp32. `positions` are the rotary positions, (b, L) or (3, b, L). `lengths` are the unpadded lengths.
    """

    tokens: Tensor
    visual: Tensor
    received: Tensor
    hidden: Tensor
    features: Tensor
    positions: Tensor
    wanted: Tensor
    lengths: tuple[int, ...]

    @staticmethod
    def of(rows: Sequence[RowStates], device: torch.device) -> States:
        """Pad rows to a batch on `device`."""
        rows = [row.map(lambda value: value.to(device)) for row in rows]
        lengths = tuple(row.length for row in rows)
        hidden = stack(row.hidden for row in rows).float()
        visual = stack(row.visual for row in rows)
        received = torch.zeros_like(hidden)
        received[visual] = torch.cat([row.received for row in rows]).float()
        return States(
            tokens=stack(row.tokens for row in rows),
            visual=visual,
            received=received,
            hidden=hidden,
            features=hidden if rows[0].features is None else stack(_features(row) for row in rows).float(),
            positions=stack_positions(rows, max(lengths)),
            wanted=stack(row.wanted for row in rows),
            lengths=lengths,
        )


def _features(row: RowStates) -> Tensor:
    assert row.features is not None
    return row.features


def extend(prefix: Prefix, token_ids: Tensor, embeds: Tensor, layer_inputs: Tensor | None = None) -> Prefix:
    """Append `token_ids` (T,) with embeddings `embeds` (T, D) to a prompt, at the rotary positions of decoding.

    The tokens belong to no block. `layer_inputs` (T, layers, P) are those of the tokens, if the prompt has such.
    """
    later = prefix.next_position + torch.arange(token_ids.shape[0], device=prefix.positions.device)
    axes, nothing = prefix.axis_offsets, torch.zeros_like(later, dtype=torch.bool)
    return replace(
        prefix,
        token_ids=torch.cat([prefix.token_ids, token_ids]),
        embeds=torch.cat([prefix.embeds, embeds.to(prefix.embeds.dtype)]),
        positions=torch.cat([prefix.positions, later if axes is None else later + axes[:, None]], dim=-1),
        visual=torch.cat([prefix.visual, nothing]),
        padding=None if prefix.padding is None else torch.cat([prefix.padding, nothing]),
        groups=None if prefix.groups is None else torch.cat([prefix.groups, _own_groups(prefix, token_ids)]),
        layer_inputs=None if layer_inputs is None else _joined(prefix.layer_inputs, layer_inputs),
    )


def _own_groups(prefix: Prefix, token_ids: Tensor) -> Tensor:
    """Return numbers of blocks of one token each, which follow a prompt."""
    return prefix.length + torch.arange(token_ids.shape[0], device=token_ids.device)


def _joined(before: Tensor | None, after: Tensor) -> Tensor:
    assert before is not None, "a prompt has the inputs of layers if its continuation has them"
    return torch.cat([before, after])


@torch.no_grad()
def make_training_sample(
    target: TargetModel, prompt: Prefix, continuation: Sequence[int], num_known: int = 0
) -> TrainingSample:
    """Create a sample of a prompt and its continuation, whose first `num_known` tokens are not learned."""
    token_ids = torch.tensor(continuation, dtype=torch.long, device=target.device)
    embeds = target.decoder.get_input_embeddings()(token_ids)  # type: ignore[operator]
    wanted = torch.zeros(prompt.length + len(continuation), dtype=torch.bool)
    wanted[prompt.length + num_known :] = True
    return TrainingSample(extend(prompt, token_ids, embeds, layer_inputs_of(target.decoder, token_ids)), wanted)


@torch.no_grad()
def teach_rows(
    target: TargetModel, training_samples: Sequence[TrainingSample], feature_layers: tuple[int, ...] = (LAST,)
) -> list[RowStates]:
    """Run the target over a batch of whole training samples in one prefill, and return the states of each sample.

    `feature_layers` are as for `models.kv.lanes.LaneModel`.
    """
    prefixes = [sample.prefix for sample in training_samples]
    index = torch.arange(len(prefixes), device=target.device)
    slots = SlotBatch(index, tuple(range(len(prefixes))), (0,) * len(prefixes))
    lanes = target.lanes(len(prefixes), 1, max(prefix.length for prefix in prefixes), feature_layers)
    prefill = lanes.admit(slots, [[prefix] for prefix in prefixes])
    features: Sequence[Tensor | None] = prefill.features
    if feature_layers == (LAST,):
        features = [None] * len(prefixes)
    return [
        RowStates(
            tokens=sample.prefix.token_ids,
            visual=sample.prefix.visual,
            received=sample.prefix.embeds[sample.prefix.visual],
            hidden=hidden,
            features=chosen,
            positions=sample.prefix.positions,
            wanted=sample.wanted.to(target.device),
        )
        for sample, hidden, chosen in zip(training_samples, prefill.states, features, strict=True)
    ]
