"""A model that the engine would run wrongly is refused when it is loaded, with the reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    SiglipVisionConfig,
    masking_utils,
)
from transformers.models.gemma3 import modeling_gemma3

from models import forward_check
from models.backends.mask_rules import LayerRule, rules_of
from models.kv.lanes import LaneModel
from models.loading.checkpoints import CheckpointError
from models.target import Target
from tests import toys
from tests.models.architectures import make as make_tiny
from tests.models.architectures import outcome
from tests.toys.text import SIZES

SMALL: dict[str, Any] = {"vocab_size": toys.VOCAB_SIZE, **SIZES}


def make(kind: str) -> torch.nn.Module:
    if kind == "state space":
        return MambaForCausalLM(MambaConfig(vocab_size=toys.VOCAB_SIZE, hidden_size=32, num_hidden_layers=2))
    if kind == "state space between attention":
        return JambaForCausalLM(JambaConfig(attn_layer_period=2, attn_layer_offset=1, num_experts=1, **SMALL))
    assert kind == "biased attention"
    return BloomForCausalLM(BloomConfig(vocab_size=toys.VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("state space", "it has layers of type linear_attention"),
        ("state space between attention", "it has layers of type linear_attention"),
        ("biased attention", "its layers 0, 1 do not attend by transformers' interface"),
    ],
)
def test_a_model_that_is_more_than_full_attention_is_refused(kind: str, reason: str) -> None:
    model = make(kind).eval()
    toys.randomise(model, 0)
    with pytest.raises(CheckpointError) as caught:
        Target(model, toys.front_end("llama"), "somewhere/model")
    message = str(caught.value)
    assert message.startswith("somewhere/model: cannot be run: ")
    assert reason in message
    assert "\n" not in message


def test_a_mistral_without_a_window_is_taken() -> None:
    model = MistralForCausalLM(MistralConfig(sliding_window=None, **SMALL)).eval()
    assert Target(model, toys.front_end("llama")).vocab_size == toys.VOCAB_SIZE


def test_inspection_does_not_change_the_model() -> None:
    model = MistralForCausalLM(MistralConfig(sliding_window=None, **SMALL)).eval()
    ids = torch.tensor([[1, 9, 30, 4]])
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        Target(model, toys.front_end("llama"))
        assert torch.equal(model(input_ids=ids).logits, before)


def test_a_decoder_that_does_not_take_embeddings_is_refused() -> None:
    model = MistralForCausalLM(MistralConfig(sliding_window=None, **SMALL)).eval()
    model.get_decoder().embed_tokens = torch.nn.Embedding(toys.VOCAB_SIZE, 24)
    with pytest.raises(CheckpointError, match="its decoder does not take embeddings and positions"):
        Target(model, toys.front_end("llama"))


LATER = "with text, logits of earlier tokens change with later ones"
ELSEWHERE = "tokens behind a prompt get other logits than in its own forward"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{name: ({}, ELSEWHERE) for name in ("bart", "mbart", "marian", "pegasus", "plbart", "blenderbot", "diffllama")},
    "bert-generation": ({"is_decoder": False}, LATER),
    "doge": ({}, "its attention uses its own mask"),
    "modernbert-decoder": ({}, "transformers shows no decoder with input embeddings and layers"),
    "gemma3_text": ({"use_bidirectional_attention": True, "layer_types": ["full_attention"] * 2}, LATER),
    "llama": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "of type dynamic, whose",
    ),
    "phi3": (
        {
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128},
                **{"short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
            }
        },
        "of type longrope, whose table depends on the longest row of a batch",
    ),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
LLAMA3["original_max_position_embeddings"] = 64
ACCEPTED: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in ("phi3", "qwen2_moe", "qwen3_moe", "mixtral", "olmo2", "granite", "gpt_neox", "opt", "gpt2")
    },
    **{name: {} for name in ("starcoder2", "smollm3", "phi", "glm", "bert-generation")},
    "llama": {"rope_parameters": YARN},
    "qwen3": {"rope_parameters": LLAMA3},
    "qwen2": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_an_architecture_that_the_engine_would_run_wrongly_is_refused_with_its_reason(kind: str) -> None:
    changes, reason = REFUSED[kind]
    model = make_tiny(kind, **changes)
    with pytest.raises(CheckpointError) as caught:
        Target(model, toys.front_end("llama"), "somewhere/model")
    message = str(caught.value)
    assert message.startswith("somewhere/model: cannot be run: ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.filterwarnings("ignore")
def test_an_architecture_that_is_accepted_gives_the_tokens_of_generate(kind: str) -> None:
    assert outcome(kind, **ACCEPTED[kind]) == "equal"


class PictureFrontEnd:
    """Prepares one picture of 16 x 16 pixels as four image tokens, as the processors of PaliGemma and Gemma 3 do."""

    takes_images, takes_videos, processor = True, False, None

    def __init__(self, is_prefix: bool = False) -> None:
        self.is_prefix = is_prefix
        self.tokenizer = toys.front_end("llama").tokenizer

    def render(self, messages: object) -> str:
        return "w5"

    def encode(self, prompt: str, images: object, videos: object = ()) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[1, 60, 60, 60, 60, 9, 12]])
        pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": torch.zeros_like(ids) if self.is_prefix else (ids == 60).long(),
            "pixel_values": pixels,
        }


def picture_model(kind: str) -> torch.nn.Module:
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    sizes = {**SMALL, "head_dim": 8}
    if kind == "paligemma":
        text = GemmaConfig(**sizes)
        config = PaliGemmaConfig(vision_config=vision, text_config=text, image_token_id=60, projection_dim=32)
        return PaliGemmaForConditionalGeneration(config)
    text = Gemma3TextConfig(**sizes, layer_types=["full_attention"] * 2)
    config = Gemma3Config(text_config=text, vision_config=vision, image_token_id=60, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


@pytest.mark.parametrize("kind", ["paligemma", "gemma3"])
@pytest.mark.filterwarnings("ignore")
def test_blocks_of_images_and_prefixes_become_rules(kind: str) -> None:
    model = picture_model(kind).eval()
    toys.randomise(model, 0)
    if kind == "paligemma":
        target = Target(model, PictureFrontEnd(is_prefix=True), "somewhere/model")  # type: ignore[arg-type]
    else:
        target = Target(model, PictureFrontEnd(), "somewhere/model")  # type: ignore[arg-type]
    assert rules_of(target.decoder) == (LayerRule(in_blocks=True),) * 2


@pytest.mark.filterwarnings("ignore")
def test_tokens_that_read_later_ones_by_no_known_rule_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Image tokens read the tokens behind them, which do not read them back."""

    def ahead(ids: torch.Tensor, device: Any = None) -> torch.Tensor:
        return torch.where(ids == 1, 7, -1)

    def overlay(ids: torch.Tensor) -> Any:
        return lambda b, h, q, k: (ids[b, q] == 7) & (k <= q + 3)

    monkeypatch.setattr(modeling_gemma3, "get_block_sequence_ids_for_mask", ahead)
    monkeypatch.setattr(masking_utils, "blockwise_overlay", overlay)
    monkeypatch.setattr(modeling_gemma3, "blockwise_overlay", overlay)
    model = picture_model("gemma3").eval()
    toys.randomise(model, 0)
    with pytest.raises(CheckpointError, match="with a picture, its attention lets tokens read later ones by"):
        Target(model, PictureFrontEnd(), "somewhere/model")  # type: ignore[arg-type]


@pytest.mark.parametrize("family", list(toys.FAMILIES))
def test_every_family_of_the_conformance_suite_is_accepted_in_half_precision_too(family: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = copy.deepcopy(toys.oracle(family)).to(dtype)
        assert Target(model, toys.front_end(family)).dtype == dtype


def test_nan_weights_are_refused() -> None:
    model = copy.deepcopy(toys.oracle("llama"))
    model.get_output_embeddings().weight.data[5] = float("nan")  # type: ignore[operator]
    with pytest.raises(CheckpointError, match="with text, its own logits are not finite"):
        Target(model, toys.front_end("llama"))


@pytest.mark.parametrize("at", ["mask", "position", "scale"])
def test_a_forward_of_the_engine_that_is_a_little_wrong_is_refused(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(toys.oracle("qwen3"))
    if at == "mask":
        monkeypatch.setattr(forward_check.Prefix, "num_kept", property(lambda self: self.length - 1))
    elif at == "position":
        monkeypatch.setattr(
            forward_check.Prefix, "next_position", property(lambda self: self.positions[..., -1].max() + 2)
        )
    else:
        true = LaneModel.logits
        monkeypatch.setattr(LaneModel, "logits", lambda self, hidden: true(self, hidden) * 1.01)
    with pytest.raises(CheckpointError, match="cannot be run: with text, "):
        Target(model, toys.front_end("qwen3"))
