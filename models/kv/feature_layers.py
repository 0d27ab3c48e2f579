"""Selects the states of a decoder that drafters read as features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LAST = -1
"""Index of the last hidden state, after the final norm, in `feature_layers`."""


class FeatureLayers:
    """States `layers` of a decoder with `num_layers` layers: the index of a layer means its input, as in the
    `hidden_states` of transformers; `LAST`, or the number of layers, is the last state after the final norm.

    `recorded` are the layers whose inputs a forward has to record.
    """

    def __init__(self, layers: Sequence[int], num_layers: int) -> None:
        assert all(-1 <= layer <= num_layers for layer in layers), (layers, num_layers)
        self._layers = tuple(LAST if layer == num_layers else layer for layer in layers)
        self.recorded = tuple(layer for layer in self._layers if layer != LAST)

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Split the states (…, W) of a forward into last hidden states (…, D) and features (…, F).

        Features are the states of the layers side by side.
        """
        if not self.recorded:
            return states, states if len(self._layers) == 1 else states[..., :0]
        hidden, *recorded = states.chunk(1 + len(self.recorded), dim=-1)
        if len(recorded) == len(self._layers):
            return hidden, states[..., hidden.shape[-1] :]
        by_layer = iter(recorded)
        return hidden, torch.cat([hidden if layer == LAST else next(by_layer) for layer in self._layers], dim=-1)
