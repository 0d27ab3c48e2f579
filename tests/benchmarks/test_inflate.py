"""Tests that an inflated model has the logits and tokens of its source model, and that planted faults are detected."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from benchmarks.inflate import folders as inflate_files
from benchmarks.inflate import model as inflating
from benchmarks.inflate.check import Inputs, compare
from benchmarks.inflate.folders import inflate_folder
from benchmarks.inflate.model import inflate, inflated_config
from benchmarks.inflate.shapes import SHAPES, InflationError, Shape, drafter_shape, named_shape, shape_of
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from tests.toys.weights import randomise
from zoo.pair import CHECKPOINTS

pytestmark = pytest.mark.slow

OLD = Shape(hidden=16, layers=2, heads=4, kv_heads=2, ffn=24)
ALL = Shape(hidden=64, layers=4, heads=16, kv_heads=8, ffn=40)
SMALL = Shape(1024, 4, 16, 16, 704)
SHAPES_OF_ALL_KINDS = {
    "as it is": OLD,
    "deeper": replace(OLD, layers=5),
    "wider": replace(OLD, hidden=64),
    "wider, by no power of four": replace(OLD, hidden=40),
    "more heads and groups": replace(OLD, heads=8, kv_heads=4),
    "more neurons": replace(OLD, ffn=31),
    "everything": ALL,
}


def toy(**changes: Any) -> LlamaForCausalLM:
    """A model whose epsilon matters, and whose heads are not its width cut in pieces of that size."""
    sizes: dict[str, Any] = {
        "hidden_size": OLD.hidden,
        "num_hidden_layers": OLD.layers,
        "num_attention_heads": OLD.heads,
        "num_key_value_heads": OLD.kv_heads,
        "intermediate_size": OLD.ffn,
        "head_dim": 8,
        "vocab_size": 50,
        "rms_norm_eps": 0.05,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes | changes)).double().eval()
    randomise(model, 3)
    drawn = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=drawn, dtype=parameter.dtype) * 0.2)
    return model


def samples(num: int = 3) -> list[Inputs]:
    drawn = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, 50, (1, length), generator=drawn) for length in (1, 4, 9)[:num]]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows]


@pytest.mark.parametrize("kind", SHAPES_OF_ALL_KINDS)
def test_a_model_of_another_shape_writes_the_same_tokens_with_the_same_logits(kind: str) -> None:
    model, shape = toy(), SHAPES_OF_ALL_KINDS[kind]
    grown = inflate(model, shape)
    assert shape_of(grown.config.to_dict()) == shape
    comparison = compare(model, grown, samples(), 12)
    assert comparison.fault == ""
    assert comparison.dtype == "float64"
    assert comparison.equal_prompts == 3
    assert comparison.equal_argmax_share == 1.0
    assert comparison.logit_difference < 2e-6


def test_pads_of_the_residual_stream_stay_zero_and_the_rest_of_the_model_is_busy() -> None:
    model = toy()
    grown = inflate(model, ALL)
    ours, theirs = (
        each(**samples()[2], output_hidden_states=True, use_cache=False).hidden_states for each in (model, grown)
    )
    for layer, states in enumerate(theirs[:-1]):
        assert not states[..., OLD.hidden :].any(), layer
        if layer < OLD.layers:
            torch.testing.assert_close(states[..., : OLD.hidden], ours[layer], rtol=1e-6, atol=1e-6)
    assert torch.equal(theirs[2], theirs[3])
    zero_outside = ("embed_tokens", "o_proj", "down_proj")
    for name, value in grown.state_dict().items():
        share = (value == 0).double().mean().item()
        assert share > 0.5 if any(part in name for part in zero_outside) else share == 0.0, (name, share)
    # What cannot reach an output still computes: extra heads attend, extra neurons fire.
    layer = grown.model.layers[3]
    hidden = layer.input_layernorm(theirs[3])
    for projected in (layer.self_attn.q_proj(hidden), layer.self_attn.v_proj(hidden), layer.mlp.up_proj(hidden)):
        assert 0.01 < projected.std() < 10.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_four_and_sixteen_times_the_width_round_as_the_source_does(dtype: torch.dtype) -> None:
    model = toy().to(dtype)
    for hidden in (64, 256):
        norms = inflate(model, replace(ALL, hidden=hidden)).model.norm.weight[: OLD.hidden]
        assert torch.equal(norms * (hidden // OLD.hidden) ** 0.5, model.model.norm.weight)
        comparison = compare(model, inflate(model, replace(ALL, hidden=hidden)), samples(), 12)
        assert comparison.fault == ""
        assert comparison.logit_difference < 0.02


# --- faults --------------------------------------------------------------------------------------------------------


def _last_norm_unscaled(model: Any) -> None:
    model.model.norm.weight[: OLD.hidden] *= 2.0


def _head_writes_into_pads(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.weight[OLD.hidden :, :8] = 0.1


def _pads_are_not_zero(model: Any) -> None:
    model.model.embed_tokens.weight[:, OLD.hidden :] = 0.01


def _queries_in_another_group(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight.copy_(attention.q_proj.weight.roll(8, 0))
    attention.o_proj.weight.copy_(attention.o_proj.weight.roll(8, 1))


FAULTS = (
    _last_norm_unscaled,
    _head_writes_into_pads,
    _pads_are_not_zero,
    _queries_in_another_group,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_sees_a_fault(fault: Callable[[Any], None]) -> None:
    model = toy()
    grown = inflate(model, ALL)
    with torch.no_grad():
        fault(grown)
    assert compare(model, grown, samples(), 12).fault != ""


# --- shapes --------------------------------------------------------------------------------------------------------


def test_an_unsupported_model_is_not_inflated_and_the_reason_is_given() -> None:
    model = toy()
    for shape, reason in (
        (replace(OLD, layers=1), "layers is 2 in the source and would shrink to 1"),
        (replace(ALL, heads=15), "divide"),
        (replace(ALL, heads=8, kv_heads=8), "share keys"),
    ):
        with pytest.raises(InflationError, match=reason):
            inflate(model, shape)
    with pytest.raises(InflationError, match="qwen2_5_vl"):
        inflated_config(json.loads((CHECKPOINTS / "video_target" / "config.json").read_text()), SMALL)
    for name in ("8B", "draft-1.5", "hidden=1024,layers=4", ""):
        with pytest.raises(InflationError, match="no shape"):
            named_shape(name)
    with pytest.raises(InflationError, match="ratio"):
        drafter_shape(OLD, 1.0)


# --- folders -------------------------------------------------------------------------------------------------------


def test_a_folder_holds_the_model_that_was_checked_and_loads_everywhere(tmp_path: Path) -> None:
    source = CHECKPOINTS / "caption_target"
    result = inflate_folder(source, tmp_path / "grown", SMALL, num_prompts=1, max_new_tokens=8)
    assert [each["dtype"] for each in result["differences"]] == ["float32", "bfloat16"]
    assert all(each["equal_prompts"] == 1 for each in result["differences"])
    assert result["differences"][1]["logit_difference"] == 0.0
    # The language model, its two vocabulary matrices and the vision tower, biases and norms left out.
    assert result["num_parameters"] == pytest.approx(SMALL.num_parameters() + 2 * 806 * 1024 + 1.7e6, rel=0.01)
    assert json.loads((tmp_path / "grown" / "inflation.json").read_text())["shape"]["hidden"] == 1024
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in (tmp_path / "grown").iterdir()} == names | {"inflation.json"}
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "grown", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    inside = inflate(inflate_files.load(source, torch.bfloat16), SMALL).state_dict()
    assert all(torch.equal(value, inside[name]) for name, value in loaded.state_dict().items())
    target = Target.load(CheckpointRef(str(tmp_path / "grown")), "auto", "cpu")
    assert target.hidden_size == 1024
    assert target.front_end.takes_images


def test_a_folder_that_would_be_another_model_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(inflating.RULES, "o_proj.weight", inflating.RANDOM)
    source, shape = CHECKPOINTS / "caption_drafter", Shape(256, 3, 4, 4, 256)
    with pytest.raises(InflationError, match="another model: in float32"):
        inflate_folder(source, tmp_path / "grown", shape, num_prompts=1, max_new_tokens=4)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_or_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InflationError, match="there already"):
        inflate_files.inflate_folder(CHECKPOINTS / "caption_target", tmp_path, SHAPES["0.3B"])
    with pytest.raises(InflationError, match=r"config\.json"):
        inflate_files.inflate_folder(tmp_path, tmp_path / "out", SHAPES["0.3B"])
