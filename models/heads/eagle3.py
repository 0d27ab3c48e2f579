"""Define the EAGLE-3 network: layers over the states of several target layers, with an own output layer.

States of the target's `feature_layers` are projected to one state. The first layer reads pairs of this state of token t
and the embedding of token t + 1; the output is the state of token t + 1, from which `output_layer` computes logits for
token t + 2. Li et al. 2025 (arXiv 2503.01840), section 3. Variants of
published files (norms, several layers, vocabulary, rotary axes) are fields of `Eagle3Shape`; P-EAGLE has a mask token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from models.heads.eagle import DecoderShape, FeatureStack
from models.loading.vocabulary import SlicedHead


@dataclass(frozen=True)
class Eagle3Shape(DecoderShape):
    """Configuration of an EAGLE-3 network.

    `layers` configures the decoder layers, of Llama or Qwen3. `feature_layers` are indices as for
    `models.kv.lanes.LaneModel`, whose states are `target_hidden_size` wide. `norm_before_fc` normalizes all features
    together, `fc_norm` those of each layer. With `norm_before_residual`, the residual of the first layer is the
    normalized state. `norm_output` feeds the output back after the final norm (EAGLE-3.1). `mrope_sections` are the
    pairs of each rotary axis; empty for one axis; with `mrope_interleaved`, pairs of the axes alternate (Qwen3-VL).
    `mask_token_id` is that of P-EAGLE; None for other heads.
    """

    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mrope_sections: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    mask_token_id: int | None = None

    @property
    def state_size(self) -> int:
        return self.target_hidden_size

    @property
    def num_features(self) -> int:
        """Width F of the concatenated features."""
        return len(self.feature_layers) * self.target_hidden_size


class FirstLayer(nn.Module):
    """A decoder layer whose attention reads an embedding and a state, (r, N, 2D); it returns states (r, N, D)."""

    def __init__(self, layer: Any, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, plain.out_features, bias=plain.bias is not None)
            setattr(self.self_attn, name, wide)

    def forward(self, pairs: Tensor, **kwargs: Any) -> Tensor:
        """Run pairs (r, N, 2D); `kwargs` are the arguments of the layer's attention."""
        embeds, states = pairs.chunk(2, dim=-1)
        normed = self.hidden_norm(states)
        inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        mixed, _ = self.self_attn(hidden_states=inputs, **kwargs)
        mixed = mixed + (normed if self.norm_before_residual else states)
        out: Tensor = mixed + self.mlp(self.post_attention_layernorm(mixed))
        return out


def pair_axes(sections: Sequence[int], interleaved: bool) -> list[int]:
    """Return the rotary axis of each pair of a head, for `sections` pairs of each axis.

    The axes follow one another (Qwen2-VL), or alternate (`interleaved`, Qwen3-VL): pair i has axis i mod 3 while that
    axis has pairs left, and axis 0 after that.
    """
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    num_axes = len(sections)
    return [i % num_axes if i < num_axes * sections[i % num_axes] else 0 for i in range(sum(sections))]


class SectionRotary(nn.Module):
    """Rotary embedding of three axes, each of which rotates some of a head's pairs (M-RoPE of Qwen2-VL and Qwen3-VL);
    see `pair_axes`."""

    axes: Tensor

    def __init__(self, config: LlamaConfig, sections: tuple[int, ...], interleaved: bool = False) -> None:
        super().__init__()
        assert 2 * sum(sections) == config.head_dim, (sections, config.head_dim)
        self.plain = LlamaRotaryEmbedding(config)
        axes = torch.tensor(2 * pair_axes(sections, interleaved))
        self.register_buffer("axes", axes, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (r, N, D_h) of positions (3, r, N), or of (r, N) for equal axes."""
        if position_ids.dim() == 2:
            return self.plain(x, position_ids)  # type: ignore[no-any-return]
        num_axes = position_ids.shape[0]
        cos, sin = self.plain(x, position_ids.flatten(0, 1))
        return self._merge(cos.unflatten(0, (num_axes, -1))), self._merge(sin.unflatten(0, (num_axes, -1)))

    def _merge(self, by_axis: Tensor) -> Tensor:
        return by_axis.gather(0, self.axes.expand_as(by_axis[:1]))[0]


class Eagle3Network(FeatureStack):
    """Token embedding, projection `fc` of the target's features, decoder layers, and output layer `lm_head`.

    `token_ids` (V_d,) are the target's ids of the draft vocabulary. P-EAGLE has `mask_hidden` (1, 1, F), the features
    of a mask. Model families with other rotary positions pass their own `rotary`.
    """

    token_ids: Tensor
    norm: LlamaRMSNorm

    def __init__(self, shape: Eagle3Shape, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.config = config = shape.layers
        config._attn_implementation = "sdpa"
        self.vocab_size, self.hidden_size = shape.vocab_size, shape.hidden_size
        self.feature_layers = shape.feature_layers
        self.takes_axes = bool(shape.mrope_sections)
        self.embed_tokens = nn.Embedding(self.vocab_size, self.hidden_size)
        eps = config.rms_norm_eps
        self.input_norm = LlamaRMSNorm(shape.num_features, eps=eps) if shape.norm_before_fc else None
        norms = [LlamaRMSNorm(shape.target_hidden_size, eps=eps) for _ in shape.feature_layers]
        self.fc_norm = nn.ModuleList(norms) if shape.fc_norm else None
        self.fc = nn.Linear(shape.num_features, self.hidden_size, bias=False)
        make: Any = Qwen3DecoderLayer if config.model_type == "qwen3" else LlamaDecoderLayer
        layers: list[nn.Module] = [make(config, index) for index in range(config.num_hidden_layers)]
        layers[0] = FirstLayer(layers[0], config, shape.norm_before_residual)
        self.layers = nn.ModuleList(layers)
        self.norm = LlamaRMSNorm(self.hidden_size, eps=eps)
        self.lm_head = nn.Linear(self.hidden_size, shape.draft_vocab_size, bias=False)
        if rotary is None:
            sections = shape.mrope_sections
            is_mixed = shape.mrope_interleaved
            rotary = SectionRotary(config, sections, is_mixed) if sections else LlamaRotaryEmbedding(config)
        self.rotary = rotary
        if shape.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, shape.num_features))
        self.register_buffer("token_ids", torch.arange(shape.draft_vocab_size), persistent=False)

    def project(self, features: Tensor) -> Tensor:
        """Project the states of `feature_layers` side by side (…, F) to states (…, D)."""
        features = features.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        projected: Tensor = self.fc(features)
        return projected

    def fuse(self, embeds: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        """See `FeatureStack.fuse`; inputs are (…, 2D), the embedding first."""
        dtype = self.fc.weight.dtype
        return torch.cat([embeds.to(dtype), features.to(dtype)], dim=-1)

    def forward(
        self, inputs_embeds: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """See `LlamaStack.forward`; the final norm belongs to the output layer, unless `norm_output`."""
        hidden = self.run_layers(inputs_embeds, position_ids, attention_mask=attention_mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden) if self.shape.norm_output else hidden)

    def output_layer(self, vocab_size: int) -> nn.Module:
        """Return the layer that computes logits (…, V) of outputs (…, D) for a target with `vocab_size` tokens."""
        rows = SlicedHead.over(self.lm_head, self.token_ids, vocab_size)
        return rows if self.shape.norm_output else nn.Sequential(self.norm, rows)
