"""A model that computes otherwise only in contexts longer than a threshold runs by a rule that was recorded from its
masks, or is refused, for thresholds of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PhimoeConfig,
)
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.drafters import NoDrafter
from decoding.trees import Chain
from models.backends.mask_rules import LayerRule
from models.forward_check import MAX_TOKENS, prompt_length, thresholds
from models.loading.checkpoints import CheckpointError
from models.loading.layers.attention_calls import UNLIMITED_TOKENS, AttentionCall, first_hidden, recorded
from models.loading.layers.layer_rules import UnsupportedMask, fit_rule, rules_from_calls
from models.loading.output_layer import OutputLayer
from models.target import Target
from tests import toys
from tests.models.architectures import LENGTHS, NUM_TOKENS, generated, outcome
from tests.models.architectures import make as make_tiny
from tests.toys.text import SIZES

SMALL: dict[str, Any] = {"vocab_size": toys.VOCAB_SIZE, **SIZES}
CPU = torch.device("cpu")


def llava_with_phimoe(window: int) -> nn.Module:
    """A model with images whose window is only in the mask that its decoder makes."""
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=window)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=60)).eval()
    toys.randomise(model, 0)
    return model


def qwen3_vl_moe(window: int) -> nn.Module:
    """A model without windows in its masks, whose configuration makes the KV cache of `generate` drop tokens."""
    text = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    config.text_config.sliding_window = window
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    toys.randomise(model, 0)
    return model


def rescaled_rotary(threshold: int) -> nn.Module:
    """A model whose rotary table is multiplied by a number past a threshold, and whose rotary type has no such rule."""
    rope = {"rope_type": "linear", "factor": 1.0, "rope_theta": 1e4, "short_mscale": 1.0, "long_mscale": 1.5}
    return make_tiny("phimoe", rope_parameters={**rope, "original_max_position_embeddings": threshold})


def hotter(threshold: int) -> nn.Module:
    """A model that scales its queries by their number in the forward, past a threshold, as Llama 4 does."""

    class Hotter(nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer, self.span = layer, threshold

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            position = torch.arange(states.shape[1], device=states.device)
            scaled: torch.Tensor = self.layer(states) * (1 + (position >= self.span).float()[:, None])
            return scaled

    model = LlamaForCausalLM(LlamaConfig(**SMALL, span=threshold)).eval()
    toys.randomise(model, 0)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Hotter(layer.self_attn.q_proj)  # type: ignore[assignment]
    return model


def capped(cap: float) -> nn.Module:
    """A model with a cap of its logits, and weights so small that the cap changes no logit of a short prompt."""
    config = Gemma3TextConfig(**SMALL, head_dim=8, layer_types=["full_attention"] * 2, final_logit_softcapping=cap)
    model = Gemma3ForCausalLM(config).eval()
    toys.randomise(model, 0)
    model.lm_head.weight.data.mul_(0.01)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: make_tiny("moshi", sliding_window=40), "the KV cache of its `generate` keeps a window of 40 tokens"),
        (lambda: qwen3_vl_moe(40), "the KV cache of its `generate` keeps a window of 40 tokens"),
        (lambda: make_tiny("deepseek_v32", layer_types=["full_attention"] * 2, **INDEXED), "the argument indices"),
        (lambda: rescaled_rotary(64), "its rotary positions depend on the longest row of a batch"),
        (lambda: rescaled_rotary(100_000), "its rotary positions depend on the longest row of a batch"),
        (lambda: hotter(100), "with text, "),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_changes_past_a_threshold_is_refused(model: Any, reason: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Target(model(), toys.front_end("llama"), "somewhere/model")
    assert str(caught.value).startswith("somewhere/model: cannot be run: ")
    assert reason in str(caught.value)


INDEXED: dict[str, Any] = {
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16},
    **{"index_head_dim": 8, "index_n_heads": 2, "index_topk": 40, "num_key_value_heads": 4, "n_group": 1},
    **{"topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
}


def test_a_sliding_window_that_no_context_exceeds_is_accepted_and_gives_the_tokens_of_generate() -> None:
    length, window = 36, 48
    assert length + NUM_TOKENS == window
    text = " ".join(["<s>", *(f"w{5 + 7 * i % 40}" for i in range(length - 1))])
    front_end = toys.front_end("llama")
    target = Target(make_tiny("phimoe", sliding_window=window), front_end, "toy", window)
    engine = Engine(target, Method(NoDrafter(), Chain(1), Exact()), 1, window)
    done = list(engine.run([Request("0", text, (), Sampling(max_new_tokens=NUM_TOKENS))]))
    same = make_tiny("phimoe", sliding_window=window)
    assert list(done[0].token_ids) == generated(same, front_end.encode(text, ())["input_ids"])


@pytest.mark.parametrize("window", [7, 48, 100_000, 131_072])
def test_a_window_of_any_size_becomes_a_rule_of_the_layers(window: int) -> None:
    for model in (make_tiny("phimoe", sliding_window=window), llava_with_phimoe(window).model.language_model):  # type: ignore[union-attr]
        decoder: Any = model.get_decoder()  # type: ignore[operator]
        with recorded(decoder) as recording, torch.inference_mode():
            decoder(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
        rules = rules_from_calls(recording.calls, 2, UNLIMITED_TOKENS)
        assert rules == [LayerRule(window=window)] * 2


def test_a_window_that_a_context_exceeds_by_one_token_gives_the_tokens_of_generate() -> None:
    assert outcome("phimoe", sliding_window=max(LENGTHS) + NUM_TOKENS - 1) == "equal"


@pytest.mark.parametrize("chunk", [2, 8, 100, 8192])
def test_chunks_of_any_size_become_a_rule(chunk: int) -> None:
    rule = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.long))
    assert fit_rule(rule, 20_000, CPU) == LayerRule(chunk=chunk)
    assert fit_rule(rule, chunk, CPU) == LayerRule()


@pytest.mark.parametrize("period", [3, 50])
def test_a_mask_that_is_neither_a_window_nor_chunks_is_refused(period: int) -> None:
    def dilated(_b: Any, _h: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (keys <= queries) & ((queries - keys < 20) | (keys % period == 1))

    with pytest.raises(UnsupportedMask, match="hides earlier tokens in contexts of 21 tokens by a rule that"):
        fit_rule(dilated, 5000, CPU)


def test_a_window_that_only_a_keyword_names_is_refused() -> None:
    call = AttentionCall(0, frozenset(), 8, None, causal_mask_function, CPU, True)
    with pytest.raises(UnsupportedMask, match="names a sliding window of 8 tokens that its mask lacks"):
        rules_from_calls([call], 1, 100)
    assert rules_from_calls([call], 1, 8) == [LayerRule()]


def test_a_cap_far_above_the_logits_of_a_short_prompt_is_found() -> None:
    target = Target(capped(30.0), toys.front_end("llama"), "somewhere/model")
    assert isinstance(target.head, OutputLayer)
    assert (target.head.scale, target.head.cap) == (1.0, 30.0)


def test_an_engine_with_longer_contexts_than_a_target_was_loaded_for_is_refused() -> None:
    method = Method(NoDrafter(), Chain(1), Exact())
    bounded = Target(rescaled_rotary(64), toys.front_end("llama"), "toy", 48)
    with pytest.raises(ValueError, match="toy was loaded for contexts up to 48 tokens"):
        Engine(bounded, method, 1, 49)
    free = Target(make_tiny("llama"), toys.front_end("llama"), "toy", 48)
    assert Engine(free, method, 1, 49).max_context_tokens == 49


def test_inspection_leaves_the_attention_implementation_as_it_was() -> None:
    model = make_tiny("llama")
    before = model.get_decoder().config._attn_implementation  # type: ignore[operator]
    Target(model, toys.front_end("llama"))
    assert model.get_decoder().config._attn_implementation == before == "sdpa"  # type: ignore[operator]


@given(window=st.integers(1, 5000), num_tokens=st.integers(2, 5000))
def test_the_first_context_that_a_window_cuts_is_one_longer_than_the_window(window: int, num_tokens: int) -> None:
    num_visible = first_hidden(sliding_window_causal_mask_function(window), num_tokens, CPU)
    assert num_visible == (window + 1 if num_tokens > window else None)


@pytest.mark.parametrize("stride", [2, 3, 7])
def test_a_mask_with_holes_between_visible_tokens_is_not_causal(stride: int) -> None:
    def rule(_b: Any, _h: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (keys <= queries) & (((queries - keys) % stride != stride - 1) | (queries - keys < 3) | (keys == 0))

    assert first_hidden(rule, 100, CPU) == 100


def test_thresholds_are_the_integers_of_the_language_model_that_are_no_sizes() -> None:
    settings = {
        **{"vocab_size": 32_000, "hidden_size": 4096, "bos_token_id": 7, "max_position_embeddings": 2048},
        **{"num_attention_heads": 44, "num_hidden_layers": 45, "num_experts_per_tok": 46, "max_window_layers": 47},
        **{"sliding_window": 511, "attention_chunk_size": 600, "use_cache": True, "span": -3, "local": [9, 33]},
        "text_config": {"floor_scale": 700, "rope_parameters": {"original_max_position_embeddings": 800}},
        "vision_config": {"image_size": 336, "window": 13},
    }
    assert thresholds(settings) == {511, 600, 9, 33, 700, 800}


@pytest.mark.parametrize(
    ("changes", "longest", "length"),
    [
        ({}, None, 16),
        ({"span": 100}, None, 200),
        ({"span": 400}, None, 508),
        ({"span": 600}, None, 16),
        ({"span": 600, "max_position_embeddings": 9000}, None, 1200),
        ({"span": 4000, "max_position_embeddings": 9000}, None, MAX_TOKENS - 4),
        ({"span": 100}, 64, 16),
        ({"span": 100}, 128, 124),
        ({}, 16, 12),
    ],
)
def test_the_test_prompt_is_longer_than_thresholds_as_far_as_contexts_are(
    changes: dict[str, int], longest: int | None, length: int
) -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "max_position_embeddings": 512, **changes}))
    assert prompt_length(model, model.model, 16, 4, longest) == length


def test_the_work_of_the_test_prompt_is_bounded_for_large_models() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, span=1000))
    assert prompt_length(model, model.model, 16, 4, None) == 16
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, span=500))
    assert 500 < prompt_length(model, model.model, 16, 4, None) <= 1000
