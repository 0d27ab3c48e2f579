"""Write files of draft heads: EAGLE and Medusa in the layouts of their public checkpoints, EAGLE-3 heads and block
drafters in the format of `speculators`, which vLLM loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.heads import files
from models.heads.block import BlockNetwork
from models.heads.config import BIASES, LAYER_FIELDS, MODEL_TYPE
from models.heads.eagle import EagleNetwork
from models.heads.eagle3 import Eagle3Network
from models.heads.formats import EAGLE3_FLAGS, LAYER_IDS
from models.heads.loader import EMBEDDING, OFFSETS
from models.heads.medusa import MedusaHeads

Arrange = Callable[[dict[str, Tensor]], dict[str, Tensor]]
_WRITTEN = ("vocab_size", *LAYER_FIELDS, "num_hidden_layers", "rope_parameters")


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
    config |= {name: getattr(shape.layers, name) for name in _WRITTEN}
    config |= {"bias": shape.bias, "qkv_bias": shape.qkv_bias} | dict(extra or {})
    state = network.state_dict()
    files.write_checkpoint(folder, config, arrange(state) if arrange else state, dtype, "pytorch_model.bin")


def save_medusa(heads: MedusaHeads, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `medusa_lm_head.pt` in the format of public checkpoints."""
    config = {"medusa_num_heads": heads.shape.num_heads, "medusa_num_layers": heads.shape.num_blocks}
    files.write_checkpoint(folder, config, heads.state_dict(), dtype, "medusa_lm_head.pt")


def save_eagle3(
    network: Eagle3Network,
    folder: Path,
    verifier: str,
    architectures: Sequence[str],
    num_speculative_tokens: int,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
    own_embedding: bool = True,
) -> None:
    """Write `config.json` and `model.safetensors` in the format of `speculators`.

    `verifier` is the target's path or hub id, with its `architectures`. Without `own_embedding`, the file has no token
    embedding, and readers take the target's. `extra` is added to the configuration.
    """
    shape = network.shape
    layers = _layers(shape.layers)
    if shape.mrope_sections:
        sections: dict[str, Any] = {"rope_type": "mrope", "mrope_section": list(shape.mrope_sections)}
        if shape.mrope_interleaved:
            sections["mrope_interleaved"] = True
        layers["rope_parameters"] = {**layers["rope_parameters"], **sections}
    assert shape.mask_token_id is None, "P-EAGLE heads are read only"
    config = _config("eagle3", "Eagle3Speculator", verifier, architectures, num_speculative_tokens)
    config |= {
        "draft_vocab_size": shape.draft_vocab_size,
        LAYER_IDS: list(shape.feature_layers),
        "transformer_layer_config": layers,
    }
    config |= {name: getattr(shape, name) for name in EAGLE3_FLAGS}
    if shape.target_hidden_size != shape.hidden_size:
        config["target_hidden_size"] = shape.target_hidden_size
    ids = network.token_ids.cpu()
    used = torch.zeros(shape.vocab_size, dtype=torch.bool)
    used[ids] = True
    state = {name: value for name, value in network.state_dict().items() if own_embedding or name != EMBEDDING}
    weights = {name: value if dtype is None else value.to(dtype) for name, value in state.items()}
    is_whole = ids.tolist() == list(range(shape.vocab_size))
    # vLLM refuses these tables for a head that drafts the whole vocabulary.
    tables = {} if is_whole else {OFFSETS: ids - torch.arange(len(ids)), "t2d": used}
    files.write_checkpoint(folder, config | dict(extra or {}), weights | tables, None)


def save_block(
    network: BlockNetwork, folder: Path, verifier: str, architectures: Sequence[str], dtype: torch.dtype | None = None
) -> None:
    """Write `config.json` and `model.safetensors` in the format of `speculators`; `verifier` as for `save_eagle3`.

    The embedding and the output layer are the target's, and are not written.
    """
    shape = network.shape
    assert not shape.has_embedding, "a trained block drafter uses the target's embedding"
    assert not shape.has_head, "a trained block drafter uses the target's output layer"
    assert not shape.views, "a trained block drafter reads everything"
    config = _config("dflash", "DFlashDraftModel", verifier, architectures, shape.max_levels)
    config |= {
        "draft_vocab_size": shape.draft_vocab_size,
        "aux_hidden_state_layer_ids": list(shape.feature_layers),
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": False,
        "transformer_layer_config": _layers(shape.layers),
    }
    files.write_checkpoint(folder, config, network.state_dict(), dtype)


def _config(kind: str, architecture: str, verifier: str, architectures: Sequence[str], num_tokens: int) -> Any:
    """Return the fields of `config.json` that all heads of `speculators` have."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        MODEL_TYPE: kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
    }


def _layers(config: Any) -> dict[str, Any]:
    """Return the field `transformer_layer_config`."""
    fields: dict[str, Any] = {name: getattr(config, name, None) for name in (*_WRITTEN, *BIASES)}
    fields["rope_theta"] = fields["rope_parameters"].get("rope_theta")  # read by releases before transformers 5
    given = {name: value for name, value in fields.items() if value is not None}
    return {"model_type": config.model_type, **given, "tie_word_embeddings": False}
