"""Tests that the GPT returns the published model's states, under a training mask and with KV-cached lanes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch
from models.llamagen.checkpoints import gpt_from_weights
from models.llamagen.gpt import Gpt
from models.llamagen.shape import GptShape
from tests.llamagen_reference import LlamaGenReference
from tests.models.llamagen.layouts import CLASSES, COLUMNS, DIM, FEATURES, GRID, HEADS, official_weights
from tests.models.llamagen.test_checkpoints import CODES, SHAPES, states

LENGTHS = (4, 1, COLUMNS)


def model(kind: str) -> tuple[Gpt, LlamaGenReference]:
    weights = official_weights(kind)
    return gpt_from_weights(SHAPES[kind], weights), LlamaGenReference(weights, HEADS, GRID)


def features_of(length: int) -> Tensor:
    return torch.randn(length, FEATURES, generator=torch.Generator().manual_seed(length))


def prefix(embeds: Tensor, num_padding: int = 0) -> Prefix:
    length = len(embeds)
    return Prefix(
        torch.zeros(length, dtype=torch.long),
        embeds,
        torch.arange(length),
        torch.zeros(length, dtype=torch.bool),
        padding=torch.arange(length) < num_padding,
        num_padding=num_padding,
    )


@torch.inference_mode()
def test_lanes_with_prompts_of_different_lengths_give_the_reference_states() -> None:
    gpt, reference = model("text")
    slots = SlotBatch(torch.arange(3), (0, 1, 2), (1, 1, 1))
    lanes = LaneModel(gpt, gpt.output, num_slots=3, num_lanes=2, capacity=COLUMNS + GRID * GRID + 4)
    prefixes, expected = [], []
    for length in LENGTHS:
        padded = torch.cat([torch.zeros(COLUMNS - length, FEATURES), features_of(length)])
        prefixes.append([prefix(embeds, COLUMNS - length) for embeds in (gpt.embed_text(padded), gpt.null_text())])
        prompt, null, padding = reference.prompts(features_of(length))
        expected.append([reference.states(inputs, padding, CODES) for inputs in (prompt, null)])
    wanted = torch.stack([torch.stack(pair) for pair in expected])  # (slots, lanes, columns + codes, D)
    prefill = lanes.admit(slots, prefixes)
    torch.testing.assert_close(prefill.last, wanted[:, :, COLUMNS - 1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(prefill.hidden, wanted[:, :, :COLUMNS], atol=1e-5, rtol=1e-5)
    for index, code in enumerate(CODES):
        now = SlotBatch(slots.index, slots.ids, (index + 1,) * 3)
        hidden = lanes.forward(
            now,
            torch.full((3, 1), code),
            torch.zeros(3, 1, dtype=torch.long),
            torch.ones(3, 1, 1, dtype=torch.bool),
        )
        torch.testing.assert_close(hidden[:, :, 0], wanted[:, :, COLUMNS + index], atol=1e-5, rtol=1e-5)
        lanes.commit(now, torch.zeros(3, 1, dtype=torch.long), torch.ones(3, dtype=torch.long))


@torch.inference_mode()
def test_a_lane_of_a_class_gives_the_reference_states() -> None:
    gpt, reference = model("class")
    slots = SlotBatch(torch.arange(1), (0,), (1,))
    lanes = LaneModel(gpt, gpt.output, num_slots=1, num_lanes=2, capacity=1 + GRID * GRID)
    prefill = lanes.admit(slots, [[prefix(gpt.embed_class(2)), prefix(gpt.embed_class(CLASSES))]])
    prompt, null, padding = reference.prompts(2)
    wanted = torch.stack([reference.states(inputs, padding, CODES) for inputs in (prompt, null)])
    torch.testing.assert_close(prefill.last[0], wanted[:, 0], atol=1e-5, rtol=1e-5)
    # All codes at once, as a chain: node i sees itself and what came before it.
    num_codes = len(CODES)
    hidden = lanes.forward(
        slots,
        torch.tensor([CODES]),
        torch.arange(num_codes)[None],
        torch.ones(num_codes, num_codes).tril().bool()[None],
    )
    torch.testing.assert_close(hidden[0], wanted[:, 1:], atol=1e-5, rtol=1e-5)


def test_training_reaches_every_weight_under_a_bool_mask_and_an_additive_one() -> None:
    gpt, _ = model("text")
    gpt.requires_grad_(True)
    length = COLUMNS + len(CODES)
    padded = torch.cat([torch.zeros(2, FEATURES), features_of(4)])
    embeds = torch.cat([gpt.embed_text(padded), gpt.get_input_embeddings()(torch.tensor(CODES))])[None]
    allowed = torch.ones(length, length).tril().bool()
    allowed[:, :2] = False
    allowed |= torch.eye(length).bool()
    added = torch.zeros(length, length).masked_fill(~allowed, -torch.inf)
    positions = torch.arange(length)[None]
    by_bool, by_sum = (
        gpt(embeds, positions, attention_mask=mask[None, None]).last_hidden_state for mask in (allowed, added)
    )
    torch.testing.assert_close(by_bool, by_sum)
    gpt.output(by_bool).square().mean().backward()
    still = [name for name, weight in gpt.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert still == []


@torch.inference_mode()
def test_configured_norm_and_rotary_constants_are_used_in_every_layer() -> None:
    weights = official_weights("class")
    gpt = gpt_from_weights(replace(SHAPES["class"], rms_eps=0.5, rope_base=7.0), weights)
    reference = LlamaGenReference(weights, HEADS, GRID, rms_eps=0.5, rope_base=7.0)
    prompt, _, padding = reference.prompts(2)
    torch.testing.assert_close(states(gpt, 2), reference.states(prompt, padding, CODES), atol=1e-5, rtol=1e-5)


def test_without_a_mask_attention_is_causal() -> None:
    gpt, reference = model("class")
    prompt, _, padding = reference.prompts(2)
    embeds = torch.cat([gpt.embed_class(2), gpt.get_input_embeddings()(torch.tensor(CODES))])[None]
    outputs = gpt(embeds, torch.arange(len(CODES) + 1)[None]).last_hidden_state[0]
    torch.testing.assert_close(outputs, reference.states(prompt, padding, CODES), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_the_token_at_a_condition_position_does_not_change_attention() -> None:
    # Zero rows: queries and keys vanish there, so all visible condition columns weigh the same.
    gpt, _ = model("text")
    swapped = features_of(COLUMNS)[[1, 0, 2, 3, 4, 5]]
    last = [
        gpt(gpt.embed_text(features)[None], torch.arange(COLUMNS)[None]).last_hidden_state[0, -1]
        for features in (features_of(COLUMNS), swapped)
    ]
    one_layer = GptShape(DIM, 1, HEADS, 256, 40, GRID, "text", COLUMNS, condition_dim=FEATURES)
    weights = {name: value for name, value in official_weights("text").items() if not name.startswith("layers.1.")}
    shallow = gpt_from_weights(one_layer, weights)
    same = [
        shallow(shallow.embed_text(features)[None], torch.arange(COLUMNS)[None]).last_hidden_state[0, -1]
        for features in (features_of(COLUMNS), swapped)
    ]
    torch.testing.assert_close(same[0], same[1])
    assert not torch.allclose(last[0], last[1], atol=1e-4), "through two layers the order is felt, by causality"


@pytest.mark.parametrize("kind", ["text", "class"])
@torch.inference_mode()
def test_half_precision_stays_near_the_full_one(kind: str) -> None:
    gpt, _ = model(kind)
    condition = features_of(4) if kind == "text" else 2
    full = states(gpt, condition)
    half = states(gpt.to(torch.bfloat16), condition)
    assert half.dtype == torch.bfloat16
    assert (half.float() - full).abs().max() < 0.15
    torch.testing.assert_close(states(gpt.to(torch.float64), condition).float(), half.float(), atol=0.15, rtol=0.0)


def test_the_condition_of_the_other_kind_is_refused() -> None:
    gpt, _ = model("class")
    with pytest.raises(AssertionError, match="conditioned on classes"):
        gpt.null_text()
    with pytest.raises(AssertionError):
        gpt.embed_class(CLASSES + 1)
    with pytest.raises(AssertionError, match="conditioned on text"):
        model("text")[0].embed_class(0)
