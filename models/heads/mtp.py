"""Define the network of multi-token-prediction (MTP) layers, which a checkpoint has beside its target.

An MTP layer reads the pair (last hidden state of token t after the final norm, embedding of token t + 1) at the rotary
position of token t + 1, and returns the state of token t + 1, from which the target's output layer computes logits for
token t + 2. DeepSeek-AI 2024 (arXiv 2412.19437), section 2.2; names of modules are those of `MtpLayer` of transformers.
The decoder layer has the class of the target's layers; embedding, rotary embedding and output layer are the target's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from models.heads import files
from models.heads.eagle import FeatureStack
from models.loading.checkpoints import CheckpointError

FULL = "full_attention"
HIDDEN_FIRST = "mtp_hidden_states_first"
"""Configuration field of checkpoints whose projection reads the hidden state before the embedding."""


class MtpNetwork(FeatureStack):
    """One MTP layer over a target's decoder: `enorm`, `hnorm`, `eh_proj`, `mtp_block` and `post_norm`.

    `block` is the decoder layer, whose configuration is `config`, and `norm` creates a norm of the target's class.
    `embedding` and `rotary` are modules of the target, which are neither in the state dict nor among the parameters.
    """

    def __init__(
        self, config: Any, block: nn.Module, norm: Callable[[], nn.Module], embedding: nn.Module, rotary: nn.Module
    ) -> None:
        super().__init__()
        weight: Tensor = embedding.weight  # type: ignore[assignment]
        self.config = config
        self.vocab_size, self.hidden_size = weight.shape
        self.takes_axes = "mrope_section" in (getattr(config, "rope_parameters", None) or {})
        self.enorm, self.hnorm, self.post_norm = norm(), norm(), norm()
        self.eh_proj = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=False)
        self.mtp_block = block
        # Assignment by nn.Module would register them, so that rounding or moving this network would change the target.
        object.__setattr__(self, "embed_tokens", embedding)
        object.__setattr__(self, "rotary", rotary)

    def fuse(self, embeds: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        """See `FeatureStack.fuse`; inputs are (…, D)."""
        dtype = self.eh_proj.weight.dtype
        parts = [self.enorm(embeds.to(dtype)), self.hnorm(features.to(dtype))]
        if getattr(self.config, HIDDEN_FIRST, False):
            parts.reverse()
        fused: Tensor = self.eh_proj(torch.cat(parts, dim=-1))
        return fused

    def forward(
        self, inputs_embeds: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """Run fused pairs (r, N, D) at the positions (r, N) or (3, r, N) of their tokens; returns `last_hidden_state`
        (r, N, D) after `post_norm`. Without an `attention_mask`, attention is causal."""
        if self.takes_axes and position_ids.dim() == 2:
            position_ids = position_ids.expand(3, -1, -1)
        positions = self.rotary(inputs_embeds, position_ids)
        out = self.mtp_block(inputs_embeds, position_embeddings=positions, attention_mask=attention_mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.post_norm(out[0] if isinstance(out, tuple) else out))


def layer_config(config: Any) -> Any:
    """Return a copy of a decoder's configuration `config` that describes one MTP layer: full attention, and the kind of
    MLP that the last layer has."""
    made = copy.deepcopy(config)
    kinds = {name: getattr(config, name, None) for name in ("layer_types", "mlp_layer_types")}
    made.num_hidden_layers = 1
    if kinds["layer_types"] is not None:
        made.layer_types = [FULL]
    if kinds["mlp_layer_types"] is not None:
        made.mlp_layer_types = [kinds["mlp_layer_types"][-1]]
    for name, value in (("first_k_dense_replace", 0), ("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if getattr(config, name, None) is not None:
            setattr(made, name, value)
    return made


def mtp_network(decoder: nn.Module, path: str) -> MtpNetwork:
    """Create an MTP layer for a target's `decoder`, on its device and in its types, with random weights.

    Raises CheckpointError, which names the target's `path`, if the decoder's layers cannot make one.
    """
    parts: Any = decoder
    rotary, norm = getattr(parts, "rotary_emb", None), getattr(parts, "norm", None)
    config = layer_config(parts.config)
    kinds = set(getattr(config, "mtp_layer_types", None) or [FULL])
    if rotary is None or norm is None or getattr(config, "rms_norm_eps", None) is None:
        raise CheckpointError(f"{path}: its decoder has no MTP layers: it lacks rotary_emb, or norm with rms_norm_eps")
    by_layer = any(isinstance(value, dict) for value in (getattr(config, "rope_parameters", None) or {}).values())
    if kinds != {FULL} or by_layer:
        raise CheckpointError(f"{path}: MTP layers with windows or rotary embeddings by layer are not supported")
    weight = next(decoder.parameters())
    with torch.random.fork_rng(devices=[]), torch.device(weight.device):
        block = type(parts.layers[-1])(config, 0)
        network = MtpNetwork(
            config,
            block,
            lambda: type(norm)(config.hidden_size, eps=config.rms_norm_eps),
            parts.get_input_embeddings(),
            rotary,
        )
    network.to(device=weight.device, dtype=weight.dtype)
    # transformers keeps some tensors of layers in fp32.
    kept = {name: value.dtype for name, value in parts.layers[-1].state_dict().items() if value.is_floating_point()}
    with torch.no_grad():
        for name, value in (*block.named_parameters(), *block.named_buffers()):
            if kept.get(name, value.dtype) == torch.float32 and value.is_floating_point():
                value.data = value.data.float()
    return network.requires_grad_(False).eval()


def load_mtp(decoder: nn.Module, tensors: Mapping[str, Tensor], path: str) -> MtpNetwork:
    """Create the MTP layer of a target's `decoder` from `tensors`, by their names in `MtpNetwork`.

    Raises CheckpointError for missing or unknown tensors, other shapes, and values that are not finite.
    """
    network = mtp_network(decoder, path)
    files.expect_shapes(path, files.shapes_of(tensors), files.shapes_of(network.state_dict()))
    files.expect_finite(path, tensors)
    network.load_state_dict(dict(tensors), strict=True)
    return network
