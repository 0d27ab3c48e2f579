"""Toy models with recurrent layers: gated delta rule, short convolutions and Mamba 2 between layers with attention.

Their decays are near 1, so that a state remembers a whole prompt. Sizes of heads, groups and kernels differ, and the
prompts of the tests are longer and shorter than a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig

from decoding.conformance.toys import IMAGE_ID, SIZES, VOCAB_SIZE, randomise
from tests.toys.qwen_vl import DEEPSTACK, IDS, PATCH_PX, SHOWN, VISION, qwen3_vl_processor
from tests.toys.weights import make_tokenizer

DELTA: dict[str, Any] = {
    "head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
THREE: dict[str, Any] = SIZES | {"num_hidden_layers": 3}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
    "partial_rotary_factor": 1.0,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_head": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}


def randomise_states(model: torch.nn.Module, seed: int) -> None:
    """Redraw all weights, with decays between 0.7 and 1."""
    randomise(model, seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_((torch.rand(parameter.shape, generator=generator) * 0.28 + 0.02).log())
            elif name.endswith(("dt_bias", ".D")):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)


def _made(model: str, config: PreTrainedConfig, seed: int) -> torch.nn.Module:
    made: torch.nn.Module = getattr(transformers, model)(config).eval()
    randomise_states(made, seed)
    return made


def _config(name: str, **options: Any) -> PreTrainedConfig:
    made: PreTrainedConfig = getattr(transformers, name)(**options)
    return made


@cache
def qwen3_next(seed: int = 0) -> torch.nn.Module:
    config = _config("Qwen3NextConfig", vocab_size=VOCAB_SIZE, **THREE, **DELTA, **EXPERTS)
    return _made("Qwen3NextForCausalLM", config, seed)


@cache
def qwen3_5(seed: int = 0) -> torch.nn.Module:
    text = {"vocab_size": VOCAB_SIZE, "rope_parameters": MROPE, **THREE, **DELTA}
    vision = {name: value for name, value in (VISION | DEEPSTACK).items() if "deepstack" not in name}
    config = _config("Qwen3_5Config", text_config=text, vision_config=vision, **IDS)
    return _made("Qwen3_5ForConditionalGeneration", config, seed)


@cache
def qwen3_5_moe(seed: int = 0) -> torch.nn.Module:
    text = {"vocab_size": VOCAB_SIZE, "rope_parameters": MROPE, **THREE, **DELTA, **EXPERTS}
    vision = {name: value for name, value in (VISION | DEEPSTACK).items() if "deepstack" not in name}
    config = _config("Qwen3_5MoeConfig", text_config=text, vision_config=vision, **IDS)
    return _made("Qwen3_5MoeForConditionalGeneration", config, seed)


@cache
def lfm2(seed: int = 0) -> torch.nn.Module:
    sizes = THREE | {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_multiple_of": 8}
    return _made("Lfm2ForCausalLM", _config("Lfm2Config", vocab_size=VOCAB_SIZE, **sizes), seed)


@cache
def lfm2_vl(seed: int = 0) -> torch.nn.Module:
    text = THREE | {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_multiple_of": 8}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = _config(
        "Lfm2VlConfig",
        text_config={"model_type": "lfm2", "vocab_size": VOCAB_SIZE, **text},
        vision_config={"model_type": "siglip2_vision_model", "patch_size": PATCH_PX, "num_patches": 16, **vision},
        image_token_id=IMAGE_ID,
        projector_hidden_size=24,
        tie_word_embeddings=False,
    )
    return _made("Lfm2VlForConditionalGeneration", config, seed)


class PatchProcessor:
    """Cuts images into the patches that LFM2-VL reads; its own image processor needs torchvision."""

    image_token = "<image>"
    image_processor = None

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()

    def __call__(self, text: str, images: Sequence[Any] = (), **options: Any) -> dict[str, torch.Tensor]:
        patches, shapes = [], []
        for image in images:
            pixels = torch.from_numpy(np.asarray(image).copy()).float() / 127.5 - 1.0
            height, width = (2 * (side // (2 * PATCH_PX)) for side in pixels.shape[:2])
            cut = pixels[: height * PATCH_PX, : width * PATCH_PX].reshape(height, PATCH_PX, width, PATCH_PX, 3)
            patches.append(cut.transpose(1, 2).reshape(height * width, -1))
            shapes.append((height, width))
        pieces = text.split(self.image_token)
        counts = [height * width // 4 for height, width in shapes]
        assert len(counts) == len(pieces) - 1, "as many images as placeholders"
        text = pieces[0] + "".join(self.image_token * n + piece for n, piece in zip(counts, pieces[1:], strict=True))
        made: dict[str, torch.Tensor] = dict(self.tokenizer(text, **options))
        if patches:
            padded = torch.nn.utils.rnn.pad_sequence(patches, batch_first=True)
            lengths = torch.tensor([len(part) for part in patches])
            made["pixel_values"], made["spatial_shapes"] = padded, torch.tensor(shapes)
            made["pixel_attention_mask"] = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
        return made


@cache
def granite_hybrid(seed: int = 0) -> torch.nn.Module:
    layers = ["linear_attention", "full_attention", "linear_attention"]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
    more = {"layer_types": layers, "attention_multiplier": 0.35, "residual_multiplier": 0.8, "logits_scaling": 1.0}
    config = _config("GraniteMoeHybridConfig", vocab_size=VOCAB_SIZE, **THREE, **MAMBA, **experts, **more)
    return _made("GraniteMoeHybridForCausalLM", config, seed)


@cache
def bamba(seed: int = 0) -> torch.nn.Module:
    config = _config("BambaConfig", vocab_size=VOCAB_SIZE, attn_layer_indices=[1], **THREE, **MAMBA)
    return _made("BambaForCausalLM", config, seed)


@cache
def nemotron_h(seed: int = 0) -> torch.nn.Module:
    sizes = {name: value for name, value in SIZES.items() if name != "num_hidden_layers"}
    config = _config(
        "NemotronHConfig",
        vocab_size=VOCAB_SIZE,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=6,
        conv_kernel=4,
        chunk_size=8,
        **sizes,
    )
    return _made("NemotronHForCausalLM", config, seed)


@cache
def falcon_h1(seed: int = 0) -> torch.nn.Module:
    # Attention and Mamba 2 in each layer.
    config = _config("FalconH1Config", vocab_size=VOCAB_SIZE, head_dim=8, mamba_d_ssm=64, **THREE, **MAMBA)
    return _made("FalconH1ForCausalLM", config, seed)


@cache
def olmo_hybrid(seed: int = 0) -> torch.nn.Module:
    layers = ["linear_attention", "full_attention", "linear_attention"]
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    config = _config("OlmoHybridConfig", vocab_size=VOCAB_SIZE, layer_types=layers, **THREE, **heads, **sizes)
    return _made("OlmoHybridForCausalLM", config, seed)


MODELS: dict[str, tuple[Callable[..., torch.nn.Module], Callable[[], Any], tuple[Any, ...]]] = {
    "qwen3_next": (qwen3_next, make_tokenizer, ()),
    "qwen3_5": (qwen3_5, qwen3_vl_processor, SHOWN),
    "qwen3_5_moe": (qwen3_5_moe, qwen3_vl_processor, SHOWN),
    "lfm2": (lfm2, make_tokenizer, ()),
    "lfm2_vl": (lfm2_vl, PatchProcessor, (((16, 16), (24, 16), (16, 32)), "<image>")),
    "granitemoehybrid": (granite_hybrid, make_tokenizer, ()),
    "bamba": (bamba, make_tokenizer, ()),
    "nemotron_h": (nemotron_h, make_tokenizer, ()),
    "falcon_h1": (falcon_h1, make_tokenizer, ()),
    "olmo_hybrid": (olmo_hybrid, make_tokenizer, ()),
}
"""By family: the model, its processor, and the sizes and placeholders of its pictures."""
