"""The image models in other shapes draw the same images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.inflate.images import compare_gpts, inflate_gpt
from benchmarks.inflate.model import Inflation
from benchmarks.inflate.shapes import InflationError, Shape
from models.llamagen.gpt import Gpt
from models.llamagen.shape import GptShape

SHAPE = Shape(hidden=256, layers=3, heads=32, kv_heads=32, ffn=48)


def toy(condition: str) -> Gpt:
    torch.manual_seed(0)
    columns = 3 if condition == "text" else 1
    gpt = Gpt(GptShape(16, 2, 2, 24, 40, 3, condition, columns, 6, 5, rms_eps=0.05)).eval()
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return gpt


@pytest.mark.parametrize("condition", ["text", "class"])
def test_a_gpt_of_another_shape_draws_the_same_image(condition: str) -> None:
    gpt = toy(condition)
    grown = inflate_gpt(gpt, SHAPE)
    assert (grown.shape.dim, grown.shape.num_heads, grown.shape.num_layers, grown.shape.ffn_dim) == (256, 32, 3, 48)
    comparison = compare_gpts(gpt, grown, 3, 1)
    assert comparison.fault == ""
    assert (comparison.equal_prompts, comparison.num_tokens, comparison.equal_argmax_share) == (3, 27, 1.0)
    assert comparison.logit_difference < 2e-6


@pytest.mark.parametrize("name", ["condition.fc1.weight", "norm.weight", "layers.1.mlp.down_proj.weight"])
def test_a_wrongly_inflated_tensor_is_detected(name: str) -> None:
    gpt = toy("text")
    grown = inflate_gpt(gpt, SHAPE)
    grown.get_parameter(name).mul_(1.5)
    assert "logits differ" in compare_gpts(gpt, grown, 2, 1).fault


def test_heads_of_another_width_are_refused() -> None:
    with pytest.raises(InflationError, match="8 wide"):
        inflate_gpt(toy("text"), replace(SHAPE, heads=16, kv_heads=16))


def test_an_unknown_tensor_is_refused() -> None:
    inflation = Inflation({"mystery.weight": torch.zeros(2)}, SHAPE, SHAPE, 0)
    with pytest.raises(InflationError, match=r"mystery\.weight"):
        inflation.fill("mystery.weight", torch.zeros(2))
