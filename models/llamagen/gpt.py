"""Define LlamaGen's GPT, a Llama over image codes that follow text features or a class label."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from models.heads.eagle import LlamaStack
from models.llamagen.rotary import GridRotary
from models.llamagen.shape import GptShape


class TextCondition(nn.Module):
    """Projection of text features to inputs of the GPT, with the learned features of the empty condition."""

    uncond_embedding: Tensor

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.condition_dim, shape.dim, bias=False)
        self.fc2 = nn.Linear(shape.dim, shape.dim, bias=False)
        null = torch.randn(shape.num_condition_tokens, shape.condition_dim) / shape.condition_dim**0.5
        self.register_buffer("uncond_embedding", null)

    def forward(self, features: Tensor) -> Tensor:
        """Project features (…, condition_dim) to inputs (…, D)."""
        projected: Tensor = self.fc2(F.gelu(self.fc1(features.to(self.fc1.weight.dtype)), approximate="tanh"))
        return projected


class Gpt(LlamaStack):
    """LlamaGen's GPT. Runs under `models.kv.lanes.LaneModel`, or for training with "sdpa" and a mask (r, 1, N, N)."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.shape = shape
        self.config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.dim,
            intermediate_size=shape.ffn_dim,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=shape.rms_eps,
            max_position_embeddings=shape.num_condition_tokens + shape.num_image_tokens,
        )
        self.config._attn_implementation = "sdpa"
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.dim)
        self.condition: nn.Module = (
            TextCondition(shape) if shape.condition == "text" else nn.Embedding(shape.num_classes + 1, shape.dim)
        )
        self.layers = nn.ModuleList(LlamaDecoderLayer(self.config, index) for index in range(shape.num_layers))
        self.norm = LlamaRMSNorm(shape.dim, eps=shape.rms_eps)
        self.output = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        self.rotary = GridRotary(shape.head_dim, shape.grid, shape.num_condition_tokens, shape.rope_base)

    def embed_text(self, features: Tensor) -> Tensor:
        """Embed text features (…, L, condition_dim), padding included, as inputs (…, L, D)."""
        assert isinstance(self.condition, TextCondition), "this model is conditioned on classes"
        projected: Tensor = self.condition(features)
        return projected

    def null_text(self) -> Tensor:
        """Return the inputs (num_condition_tokens, D) of the empty condition."""
        assert isinstance(self.condition, TextCondition), "this model is conditioned on classes"
        return self.embed_text(self.condition.uncond_embedding)

    def embed_class(self, label: int) -> Tensor:
        """Return the input (1, D) of a class label; label `num_classes` is the empty condition."""
        assert isinstance(self.condition, nn.Embedding), "this model is conditioned on text"
        assert 0 <= label <= self.shape.num_classes, (label, self.shape.num_classes)
        return self.condition.weight[label : label + 1]
