"""Find what a model computes between its output embedding and its logits: a scale and a soft cap.

Wrappers of transformers multiply logits (Cohere), divide them (Granite) or cap them (Gemma) in their `forward`, outside
the output embedding. The numbers are in their configurations under several names, so that each is tried, and the one
that reproduces the model's logits at all magnitudes is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.loading.checkpoints import CheckpointError

MAGNITUDES = (1.0, 10.0, 30.0, 1000.0)
"""Largest logits of the output embedding at which logits are compared: near the caps of released models (15 to 50), and
far below and above."""
LARGEST_STATE = 16384.0
"""Largest magnitude of an enlarged state, within half precision."""
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest accepted difference of logits, relative to the largest one, by dtype."""


class OutputLayer(nn.Module):
    """An output embedding `rows`, followed by a scale and a soft cap of its logits: c · tanh(s · x / c).

    `cap` 0 is no cap.
    """

    def __init__(self, rows: nn.Module, scale: float = 1.0, cap: float = 0.0) -> None:
        super().__init__()
        self.rows, self.scale, self.cap = rows, scale, cap

    @property
    def weight(self) -> Tensor:
        """Weights (V, D) of the output embedding."""
        weight: Tensor = self.rows.weight  # type: ignore[assignment]
        return weight

    def with_rows(self, rows: nn.Module) -> OutputLayer:
        """Return the same layer with another output embedding."""
        return OutputLayer(rows, self.scale, self.cap)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits (…, V) of hidden states (…, D)."""
        logits: Tensor = self.rows(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits


def output_layer(model: nn.Module, decoder: nn.Module, head: nn.Module, ids: Tensor, name: str) -> nn.Module:
    """Return the function from the last states of `decoder` to the logits of `model`: `head` itself, or an
    `OutputLayer` over it. `ids` (1, N) are tokens of a test prompt.

    Raises: CheckpointError if no scale and cap of the configuration give the model's logits.
    """
    samples = [_logits_at(magnitude, model, decoder, head, ids) for magnitude in MAGNITUDES]
    bound = BOUNDS.get(next(decoder.parameters()).dtype, BOUNDS[torch.bfloat16])
    numbers = _numbers(model)
    candidates = [(1.0, 0.0), *((scale, 0.0) for number in numbers for scale in (number, 1 / number))]
    candidates += [(1.0, cap) for cap in numbers]
    candidates += [(scale, cap) for cap in numbers for number in numbers for scale in (number, 1 / number)]
    for scale, cap in candidates:
        function = OutputLayer(_Given(), scale, cap)
        if all(_is_close(function(before.float()), logits.float(), bound) for before, logits in samples):
            return head if (scale, cap) == (1.0, 0.0) else OutputLayer(head, scale, cap)
    raise CheckpointError(
        f"{name}: cannot be run: its logits are not its output embedding over its last states, scaled and capped by "
        "numbers of its configuration"
    )


class _Given(nn.Module):
    """Returns its input."""

    def forward(self, logits: Tensor) -> Tensor:
        return logits


def _logits_at(
    magnitude: float, model: nn.Module, decoder: nn.Module, head: nn.Module, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return logits (1, N, V) of `head` and of the model for token ids (1, N), with the decoder's states scaled so that
    the largest logit of `head` is `magnitude`, as far as `LARGEST_STATE` allows."""
    states: list[Tensor] = []

    def enlarge(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
        hidden = out.last_hidden_state
        scale = magnitude / head(hidden).abs().max().float().clamp_min(1e-6)
        largest = LARGEST_STATE / hidden.abs().max().float().clamp_min(1e-6)
        out.last_hidden_state = hidden * torch.minimum(scale, largest).to(hidden.dtype)
        states.append(out.last_hidden_state)

    handle = decoder.register_forward_hook(enlarge)
    try:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    return head(states[0]), logits


def _is_close(ours: Tensor, theirs: Tensor, bound: float) -> bool:
    """Return whether logits differ by at most `bound`, relative to the largest; logits that are not finite are left
    out, because the check of forwards refuses them."""
    finite = ours.isfinite() & theirs.isfinite()
    difference = (ours - theirs).abs()[finite]
    return not difference.numel() or float(difference.max()) <= bound * float(theirs[finite].abs().max())


def _numbers(model: nn.Module) -> Sequence[float]:
    """Return the positive numbers other than 1 in the model's configurations whose names contain "logit"."""
    config: Any = model.config
    settings: list[dict[str, Any]] = [config.to_dict(), config.get_text_config(decoder=True).to_dict()]
    found: dict[float, None] = {}
    for part in settings:
        for name, value in part.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if "logit" in name and is_number and value > 0 and value != 1 and math.isfinite(value):
                found[float(value)] = None
    return list(found)
