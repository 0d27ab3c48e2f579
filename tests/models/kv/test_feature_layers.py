"""States of chosen layers equal transformers' `hidden_states`, in prefills and steps, on every kind of runner."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from models.backends.attention import DecoderRunner
from models.backends.cpu.backend import CpuBackend
from models.backends.cuda.graphs import CapturedDecoder
from models.inputs.prefix import Prefix
from models.kv.feature_layers import LAST
from models.kv.lanes import LaneModel, SlotBatch
from models.kv.prefill_batching import stack_positions
from models.target import Target
from tests import toys
from tests.conformance import checks
from tests.covering import tiers
from tests.models.backends.cuda.test_graphs import TapeRecorder

FAMILIES = ("llama", "llava", "qwen2_5_vl", "qwen3_vl")
LAYERS = (1, LAST, 0)
NUM_NODES = 3
CLOSE = {"atol": 3e-5, "rtol": 2e-4}


def make_runner(kind: str, decoder: Any) -> DecoderRunner:
    if kind == "eager":
        return DecoderRunner(decoder)
    runner = CpuBackend().compile(decoder) if kind == "compiled" else CapturedDecoder(decoder, TapeRecorder())
    assert runner is not None
    return runner


def states_of(decoder: Any, prefix: Prefix, tokens: Tensor) -> list[Tensor]:
    """The inputs (L + N, D) of all layers in transformers for a prompt and `tokens` (N,) after it, and the output."""
    embeds = torch.cat([prefix.embeds, decoder.get_input_embeddings()(tokens)])
    later = prefix.next_position + torch.arange(len(tokens))
    if prefix.axis_offsets is not None:
        later = later + prefix.axis_offsets[:, None]
    positions = torch.cat([stack_positions([prefix], prefix.length)[..., 0, :], later], dim=-1)
    extra: dict[str, Any] = {}
    if prefix.deepstack:
        extra["visual_pos_masks"] = torch.cat([prefix.visual, torch.zeros(len(tokens), dtype=torch.bool)])[None]
        extra["deepstack_visual_embeds"] = list(prefix.deepstack)
    out = decoder(
        inputs_embeds=embeds[None],
        position_ids=positions[..., None, :],
        use_cache=False,
        output_hidden_states=True,
        **extra,
    )
    states = [state[0].clone() for state in out.hidden_states]
    # The `hidden_states` of transformers lack the features that are added after a layer; the next layer reads them.
    for layer, added in enumerate(prefix.deepstack, 1):
        if layer < len(states) - 1:
            states[layer][: prefix.length][prefix.visual] += added
    return states


@pytest.mark.usefixtures("fresh_compiler")
@tiers("family, kind", FAMILIES, ["eager", "compiled", "captured"])
def test_features_are_the_inputs_of_layers_in_transformers(family: str, kind: str) -> None:
    target = toys.target(family)
    plain = copy.deepcopy(target.decoder)
    requests = checks.requests(family, 3)
    prefixes = [target.encode(request.prompt, request.images, request.videos) for request in requests]
    lanes = LaneModel(target.decoder, target.head, 3, 1, 260, make_runner(kind, target.decoder), LAYERS)
    slots = SlotBatch(torch.arange(3), (0, 1, 2), (1, 1, 1))
    tokens = torch.arange(3 * NUM_NODES).view(3, -1) % 11 + 5
    depth = torch.arange(NUM_NODES).expand(3, -1)
    causal = torch.ones(NUM_NODES, NUM_NODES).tril().bool().expand(3, -1, -1)
    with torch.inference_mode():
        prefill = lanes.admit(slots, [[prefix] for prefix in prefixes])
        # The first forward of a compiled runner differs from later ones.
        for _ in range(2):
            hidden, features = lanes.split(lanes.forward(slots, tokens, depth, causal))
        for row, prefix in enumerate(prefixes):
            expected = states_of(plain, prefix, tokens[row])
            wanted = torch.cat([expected[layer] for layer in LAYERS], dim=-1)
            torch.testing.assert_close(prefill.features_of(row)[0], wanted[: prefix.length], **CLOSE)
            torch.testing.assert_close(prefill.hidden_of(row)[0], expected[-1][: prefix.length], **CLOSE)
            torch.testing.assert_close(features[row, 0], wanted[prefix.length :], **CLOSE)
            torch.testing.assert_close(hidden[row, 0], expected[-1][prefix.length :], **CLOSE)
            torch.testing.assert_close(prefill.last[row, 0], expected[-1][prefix.length - 1], **CLOSE)


@pytest.mark.parametrize(("layers", "width"), [((), 0), ((LAST,), 1), ((2,), 1), ((0, 1), 2)])
def test_features_have_the_width_of_their_layers(layers: tuple[int, ...], width: int) -> None:
    target = Target(copy.deepcopy(toys.oracle("llama")), toys.front_end("llama"), "llama")
    lanes = target.lanes(1, 1, 64, layers)
    prefix = target.encode("<s> w5 w6", (), ())
    with torch.inference_mode():
        prefill = lanes.admit(SlotBatch(torch.arange(1), (0,), (1,)), [[prefix]])
    assert prefill.features_of(0).shape == (1, prefix.length, width * target.hidden_size)
    if layers in ((LAST,), (2,)):  # the toy has two layers
        assert torch.equal(prefill.features_of(0), prefill.hidden_of(0))


def test_layers_that_do_not_exist_are_refused() -> None:
    target = toys.target("llama")
    with pytest.raises(AssertionError):
        target.lanes(1, 1, 64, (3,))
