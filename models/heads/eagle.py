"""Define the EAGLE-1/2 network, one decoder layer that predicts a target's next feature.

The input is the pair (feature of token t, embedding of token t + 1), the output the predicted feature of token t + 1,
from which the target's head computes logits for token t + 2. Li et al. 2024 (arXiv 2401.15077), section 4.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from models.heads.config import BIASES, HeadConfig
from models.inputs.prefix import Prefix
from models.kv.feature_layers import LAST
from models.loading.checkpoints import CheckpointError


@dataclass(frozen=True)
class DecoderShape:
    """Configuration of decoder layers."""

    layers: LlamaConfig

    @property
    def vocab_size(self) -> int:
        return int(self.layers.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.layers.hidden_size)

    @property
    def state_size(self) -> int:
        """Width of the target's states that are features."""
        return self.hidden_size


@dataclass(frozen=True)
class EagleShape(DecoderShape):
    """Configuration of the layer; `bias` is for `fc`, `qkv_bias` for the query, key and value projections, and
    `input_norm` is whether there is a norm before attention."""

    bias: bool
    qkv_bias: bool
    input_norm: bool = False

    @staticmethod
    def of(data: Mapping[str, Any], where: str) -> EagleShape:
        """Create the shape from the contents of a `config.json`; raises CheckpointError for invalid fields."""
        config = HeadConfig(data, where)
        if config.get("num_hidden_layers", 1) != 1:
            raise CheckpointError(f"{where}: an EAGLE head has one layer, not {data['num_hidden_layers']}")
        layers = config.layers("llama", 1, **dict.fromkeys(BIASES))
        flags = {"bias": True, "qkv_bias": False} | config.flags("bias", "qkv_bias")
        return EagleShape(layers, **flags)


class LlamaStack(nn.Module):
    """Base of decoders of Llama layers, which run under `models.kv.lanes.LaneModel`; `rotary` returns (cos, sin)."""

    config: LlamaConfig
    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    norm: nn.Module
    rotary: nn.Module

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_attn_implementation(self, name: str) -> None:
        """Set the attention implementation, as `PreTrainedModel.set_attn_implementation` does."""
        self.config._attn_implementation = name

    def forward(
        self, inputs_embeds: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Run inputs (r, N, D) at `position_ids` (r, N); returns `last_hidden_state` (r, N, D) after `norm`.

        Without an `attention_mask`, attention is causal.
        """
        hidden = self.run_layers(inputs_embeds, position_ids, attention_mask=attention_mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden))

    def run_layers(self, inputs: Tensor, position_ids: Tensor, **kwargs: Any) -> Tensor:
        """Run all layers without `norm`; `kwargs` are passed to each."""
        positions = self.rotary(inputs, position_ids)
        for layer in self.layers:
            inputs = layer(inputs, position_embeddings=positions, **kwargs)
        return inputs


class FeatureStack(LlamaStack):
    """Base of EAGLE networks: layers over pairs of a feature and a token embedding, whose output is the next feature.

    `project` is called once for features of the target, `fuse` for every pair, and `pair` for a prompt. A network may
    summarize a prompt, for `fuse` of all later pairs of the sample.
    """

    vocab_size: int
    hidden_size: int
    summary_size: int = 0
    """Width C of the summary of a prompt; 0 for none."""
    feature_layers: tuple[int, ...] = (LAST,)
    """States of the target that are features, see `models.kv.feature_layers`."""
    takes_axes: bool = False
    """Whether rotary positions have three axes, those of the target; otherwise they count the pairs."""

    def project(self, features: Tensor) -> Tensor:
        """Project features of the target (…, F) to states (…, D); here F = D, and nothing changes."""
        return features

    @abstractmethod
    def fuse(self, embeds: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        """Fuse token embeddings (…, D) with states of the preceding tokens (…, D) to inputs of the layers.

        `summary` (…, C) is that of the prompt before these tokens; None is zeros.
        """

    def pair(self, prompt: Prefix, features: Tensor) -> tuple[Prefix, Tensor]:
        """Return the inputs of the layers for a prompt, and the summary (C,) for later pairs.

        Row t of `prompt` has token t + 1 with its embedding, row t of `features` (L, D) the state of token t. The
        result may have fewer rows; none of them is marked visual.
        """
        inputs = self.fuse(prompt.embeds, features)
        return replace(prompt, embeds=inputs, visual=torch.zeros_like(prompt.visual)), inputs.new_zeros(0)


class EagleNetwork(FeatureStack):
    """Token embedding, fusion layer `fc` and one Llama layer, whose output are predicted features.

    Model families with other rotary positions pass their own `rotary`.
    """

    def __init__(self, shape: EagleShape, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.config = shape.layers
        self.config._attn_implementation = "sdpa"
        self.vocab_size, self.hidden_size = shape.vocab_size, shape.hidden_size
        self.embed_tokens = nn.Embedding(self.vocab_size, self.hidden_size)
        self.fc = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=shape.bias)
        layer = LlamaDecoderLayer(self.config, 0)
        if not shape.input_norm:
            layer.input_layernorm = nn.Identity()
        if shape.qkv_bias:
            for name in ("q_proj", "k_proj", "v_proj"):
                plain = getattr(layer.self_attn, name)
                setattr(layer.self_attn, name, nn.Linear(plain.in_features, plain.out_features, bias=True))
        self.layers = nn.ModuleList([layer])
        self.norm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(self.config) if rotary is None else rotary

    def fuse(self, embeds: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        """See `FeatureStack.fuse`; inputs are (…, D)."""
        dtype = self.fc.weight.dtype
        fused: Tensor = self.fc(torch.cat([embeds.to(dtype), features.to(dtype)], dim=-1))
        return fused
