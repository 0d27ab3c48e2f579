"""Toy mixtures of experts whose published checkpoints bring MTP layers: DeepSeek-V3 and GLM-4-MoE."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from tests.toys.weights import VOCAB_SIZE, randomise

EXPERTS: dict[str, Any] = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"moe_intermediate_size": 16, "num_attention_heads": 4, "first_k_dense_replace": 1, "num_mtp_layers": 1},
    **{"n_shared_experts": 1, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 16}


@cache
def deepseek_v3(seed: int = 0) -> DeepseekV3ForCausalLM:
    model = DeepseekV3ForCausalLM(DeepseekV3Config(num_key_value_heads=4, **LATENT, **EXPERTS)).eval()
    randomise(model, seed)
    _disturb_norm(model)
    return model


@cache
def glm4_moe(seed: int = 0) -> Glm4MoeForCausalLM:
    model = Glm4MoeForCausalLM(Glm4MoeConfig(num_key_value_heads=2, head_dim=8, **EXPERTS)).eval()
    randomise(model, seed)
    _disturb_norm(model)
    return model


def _disturb_norm(model: Any) -> None:
    """Give the final norm weights that differ, without which MTP layers read equal states before and after it."""
    weight = model.model.norm.weight
    weight.data += 0.4 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
