"""Inputs that some decoders give to each layer besides the states, looked up by token (Gemma 4 E2B and E4B).

The wrapper makes them of the token ids of a prompt, with an entry of their own for images. Without them, the decoder
searches its embedding table for the embeddings that it gets, which fails for images and padding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

KEYWORD = "per_layer_inputs"
"""Argument of the decoder."""


def layer_inputs_of(decoder: nn.Module, token_ids: Tensor) -> Tensor | None:
    """Return the inputs (…, layers, P) of the tokens `token_ids` (…); None if the decoder takes none."""
    config: Any = decoder.config
    if not getattr(config, "hidden_size_per_layer_input", 0) or not hasattr(decoder, "get_per_layer_inputs"):
        return None
    inputs: Tensor = decoder.get_per_layer_inputs(token_ids, None)  # type: ignore[operator]
    return inputs
