"""Tests that a part of a decoder's layers runs each layer with its own type, rotary embedding and mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, Gemma3TextModel

from decoding.conformance.toys import SIZES, randomise
from models.backends.attention import some_layers

KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
ROTARY = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}


def model(kinds: list[str]) -> Gemma3TextModel:
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": len(kinds)}
    config = Gemma3TextConfig(
        vocab_size=64, head_dim=8, layer_types=kinds, sliding_window=4, rope_parameters=ROTARY, **sizes
    )
    return Gemma3TextModel(config).eval()


@torch.inference_mode()
@pytest.mark.parametrize("indices", [(0, 2), (2, 3), (2, 4), (1, 2, 3, 4)])
def test_layers_keep_their_types(indices: tuple[int, ...]) -> None:
    whole = model(KINDS)
    randomise(whole, 3)
    alone = model([KINDS[index] for index in indices])
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            parts = name.split(".")
            if parts[0] == "layers":
                parts[1] = str(indices[int(parts[1])])
            parameter.copy_(whole.get_parameter(".".join(parts)))
    tokens = torch.arange(4, 24)[None]
    view = some_layers(whole, indices)
    expected = alone(input_ids=tokens, use_cache=False).last_hidden_state
    torch.testing.assert_close(view(input_ids=tokens, use_cache=False).last_hidden_state, expected)
    assert whole.config.layer_types == KINDS
    assert whole.config.num_hidden_layers == len(KINDS)
