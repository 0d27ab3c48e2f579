"""Calling a decoder over memory: the one place where a forward enters transformers' layers.

Knows the keyword under which `models.backends.attention` finds its step. Knows nothing of slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from models.backends.attention import IMPLEMENTATION, AttentionStep

RunDecoder = Callable[[Tensor, Tensor, AttentionStep, dict[str, Any]], Tensor]
"""Stands for a decoder: `run_decoder` with the first argument given, or something that does the same faster."""


def take_over(decoder: nn.Module) -> None:
    """Let the decoder attend by `models.backends.attention`."""
    config: Any = decoder.config
    if config._attn_implementation != IMPLEMENTATION:
        decoder.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]


def run_decoder(
    decoder: nn.Module, embeds: Tensor, positions: Tensor, step: AttentionStep, extra: dict[str, Any]
) -> Tensor:
    """Embedded inputs (r, N, D) and positions (r, N) or (3, r, N) → last hidden states (r, N, D)."""
    out = decoder(
        inputs_embeds=embeds, position_ids=positions, attention_mask=None, use_cache=False, lanes=step, **extra
    )
    hidden: Tensor = out.last_hidden_state
    return hidden
