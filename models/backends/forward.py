"""Run forwards of transformers decoders with the attention implementation of `models.backends.attention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from models.backends.attention import IMPLEMENTATION, AttentionStep


def use_ragged_attention(decoder: nn.Module) -> None:
    """Select `models.backends.attention` as the decoder's attention implementation."""
    config: Any = decoder.config
    if config._attn_implementation != IMPLEMENTATION:
        decoder.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]


def run_decoder(
    decoder: nn.Module, embeds: Tensor, positions: Tensor, step: AttentionStep, extra: dict[str, Any]
) -> Tensor:
    """Run embedded inputs (r, N, D) at positions (r, N) or (3, r, N); returns the last hidden states (r, N, D)."""
    out = decoder(
        inputs_embeds=embeds, position_ids=positions, attention_mask=None, use_cache=False, lanes=step, **extra
    )
    hidden: Tensor = out.last_hidden_state
    return hidden


class DecoderRunner:
    """Run a decoder eagerly. Backends subclass it; one runner serves any number of KV caches."""

    mode = "eager"
    """Execution mode of forwards, for provenance."""
    is_compiled = False

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder
        use_ragged_attention(decoder)

    def __call__(self, embeds: Tensor, positions: Tensor, step: AttentionStep, extra: dict[str, Any]) -> Tensor:
        """See `run_decoder`."""
        return run_decoder(self.decoder, embeds, positions, step, extra)

    def output_layer(self, head: nn.Module) -> nn.Module:
        """Return the output layer for use with this runner, such as one with packed weights; here `head` itself."""
        return head
