"""Define the block drafter network (DFlash): one forward predicts a whole block of tokens from the target's states.

The block is the pending token and mask tokens; its positions attend to each other in both directions, and to keys and
values of the target's projected features at all earlier positions. Some layers may read a window of them only, or be
causal inside the block. The output at mask i predicts the token at its own position, the i-th after the pending one.
Chen et al. 2026 (arXiv 2602.06036).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from models.backends.attention import AttentionStep, mask_bias
from models.heads.eagle import DecoderShape, LlamaStack
from models.loading.vocabulary import SlicedHead


@dataclass(frozen=True)
class View:
    """What the positions of a block read in one layer.

    `window` W bounds the distance of positions that are read; None is no bound. With `from_anchor`, it is the distance
    of earlier positions from the pending token: all positions of the block read the last W positions before it.
    Otherwise each position reads those at a distance below W from itself. `is_causal` is whether a position of the
    block reads none behind it.
    """

    window: int | None = None
    is_causal: bool = False
    from_anchor: bool = False

    def mask(self, lens: Tensor, num_nodes: int, num_columns: int) -> Tensor:
        """Return which KV positions a block reads, bool (r, 1, N, `num_columns`), behind `lens` (r,) committed ones."""
        column, node = (torch.arange(count, device=lens.device) for count in (num_columns, num_nodes))
        from_pending = column - lens[:, None, None]  # (r, 1, columns): below 0 is committed
        ahead = from_pending - node[:, None]  # (r, N, columns): distance of the KV position from the own one
        visible = (ahead <= 0) if self.is_causal else (from_pending < num_nodes)
        if self.window is not None:
            near = from_pending >= -self.window if self.from_anchor else ahead.abs() < self.window
            visible = visible & near
        return visible.expand(-1, num_nodes, -1)[:, None]


@dataclass(frozen=True)
class BlockShape(DecoderShape):
    """Configuration of a block drafter.

    `layers` configures the decoder layers, whose `views` restrict attention; without them, every layer reads
    everything. `feature_layers` are indices as for `models.kv.feature_layers`.
    `block_size` counts the pending token and the masks. The file may have an own token embedding and an own output
    layer, of `draft_vocab_size` rows; otherwise those of the target are used.
    """

    layers: Qwen3Config
    feature_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    draft_vocab_size: int
    has_embedding: bool = False
    has_head: bool = False
    views: tuple[View, ...] = ()

    @property
    def max_levels(self) -> int:
        """Number of tokens that one block drafts."""
        return self.block_size - 1


class BlockNetwork(LlamaStack):
    """Projection `fc` of the target's features, and decoder layers over a block. Qwen3 layers for any target.

    `context` runs under a `LaneModel` and fills its KV cache; the network itself runs over the same cache, as another
    runner. `token_ids` (V_d,) are the target's ids of the draft vocabulary. `embed_tokens` and `lm_head` are absent if
    the target's are used.
    """

    token_ids: Tensor

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        self.config = config = shape.layers
        config._attn_implementation = "sdpa"
        self.hidden_size, self.feature_layers = shape.hidden_size, shape.feature_layers
        self.fc = nn.Linear(len(shape.feature_layers) * self.hidden_size, self.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(self.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(self.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)
        if shape.has_embedding:
            self.embed_tokens = nn.Embedding(shape.vocab_size, self.hidden_size)
        if shape.has_head:
            self.lm_head = nn.Linear(self.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("token_ids", torch.arange(shape.draft_vocab_size), persistent=False)

    def run_layers(
        self, inputs: Tensor, position_ids: Tensor, lanes: AttentionStep | None = None, **kwargs: Any
    ) -> Tensor:
        """Run all layers over a block (r, N, D); with an attention step `lanes`, each layer reads its own view."""
        positions = self.rotary(inputs, position_ids)
        steps: dict[View, AttentionStep | None] = {View(): lanes}
        for layer, view in zip(self.layers, self.shape.views or [View()] * len(self.layers), strict=True):
            if view not in steps:
                assert lanes is not None, "windows are defined over a KV cache"
                # A block begins at the first position that is not committed.
                mask = view.mask(lanes.columns[:, 0], inputs.shape[1], lanes.window)
                steps[view] = replace(lanes, mask=mask_bias(mask, inputs.dtype), kernel=None, _on_device={})
            given = {} if lanes is None else {"lanes": steps[view]}
            inputs = layer(inputs, position_embeddings=positions, **given, **kwargs)
        return inputs

    @property
    def context(self) -> BlockContext:
        """The decoder that writes projected features to the KV cache."""
        return BlockContext(self)

    def project(self, features: Tensor) -> Tensor:
        """Project the states of `feature_layers` side by side (…, F) to states (…, D)."""
        projected: Tensor = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        return projected

    def keys_and_values(self, projected: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's keys and values (r, H_kv, N, D_h) of projected features (r, N, D) at positions (r, N)."""
        cos, sin = self.rotary(projected, positions)
        for layer in self.layers:
            attention: Any = layer.self_attn
            shape = (*projected.shape[:-1], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(projected).view(shape)).transpose(1, 2)
            keys, _rotated = apply_rotary_pos_emb(keys, keys, cos, sin)
            yield keys, attention.v_proj(projected).view(shape).transpose(1, 2)

    def embedding(self, target: nn.Module) -> nn.Module:
        """Return the token embedding: the own one, or the target's."""
        return self.embed_tokens if self.shape.has_embedding else target

    def output_layer(self, head: nn.Module, vocab_size: int) -> nn.Module:
        """Return the layer that computes logits (…, V) of outputs (…, D): the own one, or the target's `head`."""
        if not self.shape.has_head:
            return head
        return SlicedHead.over(self.lm_head, self.token_ids, vocab_size)


class BlockContext(nn.Module):
    """Writes keys and values of projected features to the KV cache; no layer is run, and no position is read."""

    def __init__(self, network: BlockNetwork) -> None:
        super().__init__()
        self.network = network
        self.config = network.config

    def set_attn_implementation(self, name: str) -> None:
        self.network.set_attn_implementation(name)

    def forward(self, inputs_embeds: Tensor, position_ids: Tensor, lanes: AttentionStep, **_: Any) -> BaseModelOutput:
        """Write projected features (r, N, D) at positions (r, N), and return them."""
        for index, (keys, values) in enumerate(self.network.keys_and_values(inputs_embeds, position_ids)):
            lanes.cache.write(index, lanes.index, keys, values)
        return BaseModelOutput(last_hidden_state=inputs_embeds)
