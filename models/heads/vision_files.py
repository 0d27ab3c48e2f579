"""Read files of ViSpec and MSD heads: an EAGLE-1/2 head for a vision-language model, in the layout of EAGLE.

`config.json` names the target's `model_type`, which determines the layer of MSD. The number of queries of ViSpec's
adaptor follows from the tensor `imadpt.q`. A file without `embed_tokens` uses the target's, which the public training
does not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from models.heads import files
from models.heads.eagle import IGNORED, WEIGHT_NAMES, EagleNetwork, EagleShape, expect_kind
from models.heads.msd import MsdNetwork
from models.heads.vispec import VispecNetwork
from models.loading.checkpoints import DTYPES, CheckpointError, CheckpointRef

VisionKind = Literal["vispec", "msd"]
MAX_QUERIES = 256
"""Most queries of an adaptor; the public heads have two."""
_FAMILIES = {"llava": "llava", "llava_next": "llava", "qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_5_vl"}
"""Family of each target's `model_type` for which there are heads. Public configurations do not distinguish the versions
of LLaVA."""
_QWEN_LAYERS = ("qwen2_vl", "qwen2_5_vl")
_NAMES = {"vispec": "ViSpec", "msd": "MSD"}
_EMBEDDING, _QUERIES = "embed_tokens.weight", "imadpt.q"


@dataclass(frozen=True)
class VisionShape:
    """Shape of a head of a `kind`, which was trained for targets of a `model_type`."""

    kind: VisionKind
    eagle: EagleShape
    model_type: str

    def is_for(self, model_type: str) -> bool:
        """Return whether the head was trained for targets of the family of `model_type`."""
        return _FAMILIES[self.model_type] == _FAMILIES.get(model_type)


def read_vision_shape(ref: CheckpointRef, kind: VisionKind) -> VisionShape:
    """Read the shape of a checkpoint; for a local folder it is compared with the weights, whose values must be finite.

    Raises CheckpointError.
    """
    folder = files.head_folder(ref, WEIGHT_NAMES, weights=False)
    shape = _shape(ref, folder, kind)
    if ref.is_folder:
        _check(ref, shape, _read(folder))
    return shape


def load_vision_head(
    ref: CheckpointRef, kind: VisionKind, embedding: Tensor, dtype: str, device: torch.device
) -> EagleNetwork:
    """Load a head in evaluation mode; `dtype` is a key of `DTYPES`, or "auto" for the stored type.

    `embedding` (V, D) is the target's input embedding, which a file without an own one uses. Raises CheckpointError.
    """
    folder = files.head_folder(ref, WEIGHT_NAMES)
    shape, weights = _shape(ref, folder, kind), _read(folder)
    _check(ref, shape, weights)
    vocab_size, width = shape.eagle.llama.vocab_size, shape.eagle.llama.hidden_size
    if _EMBEDDING not in weights:
        if embedding.shape[1] != width or embedding.shape[0] < vocab_size:
            raise CheckpointError(
                f"{ref.path}: it has no {_EMBEDDING}, and the target's embedding of shape {list(embedding.shape)} does "
                f"not fit {vocab_size} tokens of width {width}"
            )
        weights[_EMBEDDING] = embedding[:vocab_size]
    network = _network(shape, weights)
    network.load_state_dict(weights, strict=True)
    network.to(device=device, dtype=DTYPES.get(dtype, weights["fc.weight"].dtype))
    return network.requires_grad_(False).eval()


def _read(folder: Path) -> dict[str, Tensor]:
    found = files.read_tensors(files.weight_file(folder, WEIGHT_NAMES))
    return {name: value for name, value in found.items() if not name.endswith(IGNORED)}


def _shape(ref: CheckpointRef, folder: Path, kind: VisionKind) -> VisionShape:
    config = files.read_json(folder)
    if not config:
        raise CheckpointError(f"{folder}: {_NAMES[kind]} heads need their config.json")
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise CheckpointError(
            f"{ref.path}: config.json gives model_type {model_type!r}; there are {_NAMES[kind]} heads for "
            f"{', '.join(_FAMILIES)}, and other EAGLE-1/2 heads have drafter kind eagle"
        )
    layer = _plain_rope(config)
    if kind == "vispec" or model_type not in _QWEN_LAYERS:
        return VisionShape(kind, EagleShape.of(layer, ref.path), model_type)
    shape = EagleShape.of(layer | {"qkv_bias": True}, ref.path)
    return VisionShape(kind, replace(shape, input_norm=True), model_type)


def _plain_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with one rotary axis: a head's positions count its pairs, so that three axes are equal."""
    plain = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, dict) and "mrope_section" in rope:
            plain |= {name: None, "rope_theta": rope.get("rope_theta", config.get("rope_theta"))}
    return plain


def _network(shape: VisionShape, weights: Mapping[str, Tensor]) -> EagleNetwork:
    if shape.kind == "vispec":
        return VispecNetwork(shape.eagle, weights[_QUERIES].shape[0])
    return MsdNetwork(shape.eagle)


def _check(ref: CheckpointRef, shape: VisionShape, weights: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the tensors of a file have the names and shapes of `shape`, and finite values."""
    expect_kind(ref.path, weights, shape.kind)
    if shape.kind == "vispec":
        if _QUERIES not in weights:
            raise CheckpointError(
                f"{ref.path}: it has no {_QUERIES}, so it is no ViSpec head; MSD and EAGLE-1/2 heads have drafter kind "
                "msd and eagle"
            )
        queries = weights[_QUERIES]
        if queries.dim() != 3 or not 1 <= queries.shape[0] <= MAX_QUERIES:
            raise CheckpointError(
                f"{ref.path}: {_QUERIES} has shape {list(queries.shape)}; it must hold 1 to {MAX_QUERIES} queries by "
                "head and dimension"
            )
    with torch.device("meta"):
        expected = files.shapes_of(_network(shape, weights).state_dict())
    if _EMBEDDING not in weights:
        del expected[_EMBEDDING]
    files.expect_shapes(ref.path, files.shapes_of(weights), expected)
    files.expect_finite(ref.path, weights)
