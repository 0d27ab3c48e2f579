"""Read and write fields and tables that files of draft heads share, most of them in the format of `speculators`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.heads import files
from models.loading.checkpoints import CheckpointError, CheckpointRef

WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")
MODEL_TYPE = "speculators_model_type"
OFFSETS = "d2t"
"""Name of the tensor with the offset from each draft id to its target id."""
IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that training stores and that are redundant: parts of the target, and tables from the configuration."""
MAX_LAYERS = 16
"""Most decoder layers and feature layers of a head."""


def part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a JSON object inside a configuration; empty if it is missing or of another type."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def whole(config: Mapping[str, Any], name: str, where: str, default: int | None) -> int:
    """Return a positive whole number; raises CheckpointError, also if it is missing and there is no default."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{where}: it must give {name} as a positive whole number")
    return value


def read_verifier(ref: CheckpointRef) -> tuple[str, ...]:
    """Return the architectures of the target that a head was trained for; empty if its file does not name them."""
    config = files.read_json(files.head_folder(ref, WEIGHT_NAMES, weights=False))
    verifier = part(part(config, "speculators_config"), "verifier")
    return tuple(str(name) for name in verifier.get("architectures") or ())


def written_config(
    kind: str, architecture: str, verifier: str, architectures: Sequence[str], num_speculative_tokens: int
) -> dict[str, Any]:
    """Return the fields of `config.json` that all draft heads have, of a head for the target `verifier`."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
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


def written_layers(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields `names` of a layer configuration, for `transformer_layer_config`."""
    fields: dict[str, Any] = {name: getattr(config, name, None) for name in names}
    fields["rope_theta"] = fields["rope_parameters"].get("rope_theta")  # read by releases before transformers 5
    given = {name: value for name, value in fields.items() if value is not None}
    return {"model_type": config.model_type, **given, "tie_word_embeddings": False}


def draft_token_ids(where: str, tensors: Mapping[str, Tensor], draft_vocab_size: int, vocab_size: int) -> Tensor:
    """Return the target's ids of the draft vocabulary, (V_d,), from the tensor `OFFSETS` if there is one.

    Raises CheckpointError for ids that the target lacks or that occur twice.
    """
    numbers = torch.arange(draft_vocab_size)
    if OFFSETS not in tensors:
        return numbers
    offsets = tensors[OFFSETS]
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise CheckpointError(f"{where}: {OFFSETS} must hold whole numbers, not {offsets.dtype}")
    ids = numbers + offsets.long()
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise CheckpointError(
            f"{where}: {OFFSETS} names token {int(outside[0])}, and the vocabulary has {vocab_size} tokens"
        )
    if len(set(ids.tolist())) < len(ids):
        raise CheckpointError(f"{where}: {OFFSETS} maps two draft tokens to one token of the target")
    return ids
