"""Define the EAGLE-1/2 network, one decoder layer that predicts a target's next feature, and read and write its files.

The input is the pair (feature of token t, embedding of token t + 1), the output the predicted feature of token t + 1,
from which the target's head computes logits for token t + 2. Li et al. 2024 (arXiv 2401.15077), section 4.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from models.heads import files
from models.inputs.prefix import Prefix
from models.kv.feature_layers import LAST
from models.loading.checkpoints import DTYPES, CheckpointError, CheckpointRef

WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
_HEADS = ("num_key_value_heads", "head_dim")
_OTHERS = ("rms_norm_eps", "hidden_act", "max_position_embeddings")
LAYER_FIELDS = (*_SIZES[1:], *_HEADS, *_OTHERS)
"""Configuration fields of one Llama layer, besides its rotary embedding."""
_WRITTEN = (*_SIZES, *_HEADS, "num_hidden_layers", *_OTHERS, "rope_parameters")
_READ = (*_WRITTEN, "rope_theta", "rope_scaling")
Arrange = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Converts a file's tensors to the network's or back, for model families whose files order weights differently."""
# Redundant buffers of old files; they are computed from the configuration.
IGNORED = ("rotary_emb.inv_freq",)
_SIGNS = (
    ("eagle3", "an EAGLE-3 head", ("midlayer.", "d2t", "t2d")),
    ("vispec", "a ViSpec head", ("imadpt.", "img_fc.")),
)
"""Drafter kind, name, and first letters of the tensors that only this kind has."""


@dataclass(frozen=True)
class EagleShape:
    """Configuration of the layer; `bias` is for `fc`, `qkv_bias` for the query, key and value projections, and
    `input_norm` is whether there is a norm before attention."""

    llama: LlamaConfig
    bias: bool
    qkv_bias: bool
    input_norm: bool = False

    @staticmethod
    def of(data: dict[str, Any], where: str) -> EagleShape:
        """Create the shape from the contents of a `config.json`; raises CheckpointError for invalid fields."""
        for name in _SIZES:
            if not isinstance(data.get(name), int) or data[name] < 1:
                raise CheckpointError(f"{where}: config.json must give {name} as a positive whole number")
        if data.get("num_hidden_layers", 1) != 1:
            raise CheckpointError(f"{where}: an EAGLE head has one layer, not {data['num_hidden_layers']}")
        given = {name: data[name] for name in _READ if data.get(name) is not None}
        try:
            llama = LlamaConfig(**given | {"num_hidden_layers": 1})
        except Exception as error:  # transformers' own strict checks
            raise CheckpointError(f"{where}: config.json describes no Llama layer: {error}") from None
        bias, qkv_bias = data.get("bias", True), data.get("qkv_bias", False)
        if not isinstance(bias, bool) or not isinstance(qkv_bias, bool):
            raise CheckpointError(f"{where}: bias and qkv_bias in config.json must be true or false")
        return EagleShape(llama, bias, qkv_bias)


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
        self.config = shape.llama
        self.config._attn_implementation = "sdpa"
        self.vocab_size, self.hidden_size = shape.llama.vocab_size, shape.llama.hidden_size
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


def read_eagle_shape(ref: CheckpointRef) -> EagleShape:
    """Read the shape of a checkpoint; for a local folder it is compared with names and shapes of the weights."""
    folder = files.head_folder(ref, WEIGHT_NAMES, weights=False)
    shape = _shape(ref, folder)
    if ref.is_folder:
        _check(ref, shape, files.read_shapes(files.weight_file(folder, WEIGHT_NAMES)))
    return shape


def load_eagle(
    ref: CheckpointRef,
    dtype: str,
    device: torch.device,
    rotary: nn.Module | None = None,
    arrange: Arrange | None = None,
) -> EagleNetwork:
    """Load a head in evaluation mode; `dtype` is a key of `DTYPES`, or "auto" for the stored type.

    `rotary` is passed to `EagleNetwork`; `arrange` converts the file's tensors to the network's order.
    """
    folder = files.head_folder(ref, WEIGHT_NAMES)
    shape = _shape(ref, folder)
    weights = files.read_tensors(files.weight_file(folder, WEIGHT_NAMES))
    _check(ref, shape, files.shapes_of(weights))
    network = EagleNetwork(shape, rotary)
    weights = {name: value for name, value in weights.items() if not name.endswith(IGNORED)}
    network.load_state_dict(arrange(weights) if arrange else weights, strict=True)
    network.to(device=device, dtype=DTYPES.get(dtype, weights["fc.weight"].dtype))
    return network.requires_grad_(False).eval()


def save_eagle(
    network: EagleNetwork,
    folder: Path,
    dtype: torch.dtype | None = None,
    arrange: Arrange | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write `config.json` and `pytorch_model.bin` in the format of public checkpoints.

    `arrange` converts the network's tensors to the file's order; `extra` is added to the configuration.
    """
    shape = network.shape
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {name: getattr(shape.llama, name) for name in _WRITTEN}
    config |= {"bias": shape.bias, "qkv_bias": shape.qkv_bias} | dict(extra or {})
    state = network.state_dict()
    files.write_checkpoint(folder, config, arrange(state) if arrange else state, dtype, "pytorch_model.bin")


def _shape(ref: CheckpointRef, folder: Path) -> EagleShape:
    if config := files.read_json(folder):
        return EagleShape.of(config, ref.path)
    raise CheckpointError(f"{folder}: an EAGLE head needs its config.json")


def expect_kind(where: str, names: Iterable[str], kind: str) -> None:
    """Raise CheckpointError if tensors with these names belong to a head of another kind of drafter than `kind`."""
    for other, what, signs in _SIGNS:
        if other != kind and any(name.startswith(signs) for name in names):
            raise CheckpointError(f"{where}: this is {what}; set method.drafter.kind to {other}")


def _check(ref: CheckpointRef, shape: EagleShape, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the tensors of a file have the names and shapes of `shape`."""
    expect_kind(ref.path, shapes, "eagle")
    with torch.device("meta"):
        expected = files.shapes_of(EagleNetwork(shape, nn.Identity()).state_dict())
    found = {name: size for name, size in shapes.items() if not name.endswith(IGNORED)}
    files.expect_shapes(ref.path, found, expected)
