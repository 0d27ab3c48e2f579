"""Read and write files of EAGLE-3 heads: the format of `speculators`, and the Llama format of EAGLE and SpecForge.

Both store the same network; the format follows from `config.json`. P-EAGLE heads of `speculators` are read only.
`d2t` holds the offset from each draft id to its target id; `t2d` is redundant and not read. Indices of target layers
differ, see `_layer_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from models.heads import files
from models.heads.eagle3 import Eagle3Network, Eagle3Shape
from models.heads.speculators import (
    IGNORED,
    MAX_LAYERS,
    MODEL_TYPE,
    OFFSETS,
    WEIGHT_NAMES,
    draft_token_ids,
    part,
    whole,
    written_config,
    written_layers,
)
from models.loading.checkpoints import DTYPES, CheckpointError, CheckpointRef

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
_FIELDS = (
    *_SIZES,
    *("num_key_value_heads", "head_dim", "num_hidden_layers", "rms_norm_eps", "hidden_act", "max_position_embeddings"),
    *("attention_bias", "mlp_bias", "rope_parameters", "rope_theta", "rope_scaling"),
)
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_MODEL_TYPES: dict[str, type[Any]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_EMBEDDING = "embed_tokens.weight"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_PARALLEL = "peagle"


def read_eagle3_shape(ref: CheckpointRef, num_target_layers: int) -> Eagle3Shape:
    """Read the shape of a checkpoint for a target with `num_target_layers` layers.

    For a local folder, it is compared with the weights, whose values must be finite. Raises CheckpointError.
    """
    folder = files.head_folder(ref, WEIGHT_NAMES, weights=False)
    shape = _shape(ref, folder, num_target_layers)
    if ref.is_folder:
        tensors = _read(folder)
        _check(ref, shape, tensors)
    return shape


def load_eagle3(
    ref: CheckpointRef,
    num_target_layers: int,
    embedding: Tensor,
    dtype: str,
    device: torch.device,
    rotary: nn.Module | None = None,
) -> Eagle3Network:
    """Load a head in evaluation mode; `dtype` is a key of `DTYPES`, or "auto" for the stored type.

    `embedding` (V, D) is the target's input embedding, which a file without an own one uses. `rotary` is passed to
    `Eagle3Network`. Raises CheckpointError.
    """
    folder = files.head_folder(ref, WEIGHT_NAMES)
    shape = _shape(ref, folder, num_target_layers)
    tensors = _read(folder)
    _check(ref, shape, tensors)
    network = Eagle3Network(shape, rotary)
    network.token_ids = draft_token_ids(ref.path, tensors, shape.draft_vocab_size, shape.vocab_size)
    weights = {name: value for name, value in tensors.items() if name != OFFSETS}
    if _EMBEDDING not in weights:
        if embedding.shape[1] != shape.hidden_size or embedding.shape[0] < shape.vocab_size:
            raise CheckpointError(
                f"{ref.path}: it has no {_EMBEDDING}, and the target's embedding of shape {list(embedding.shape)} does "
                f"not fit {shape.vocab_size} tokens of width {shape.hidden_size}"
            )
        weights[_EMBEDDING] = embedding[: shape.vocab_size]
    network.load_state_dict(weights, strict=True)
    network.to(device=device, dtype=DTYPES.get(dtype, tensors["fc.weight"].dtype))
    return network.requires_grad_(False).eval()


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
    """Write `config.json` and `model.safetensors` in the format of `speculators`, which vLLM loads.

    `verifier` is the target's path or hub id, with its `architectures`. Without `own_embedding`, the file has no token
    embedding, and readers take the target's.
    `extra` is added to the configuration.
    """
    shape = network.shape
    names = [name for name in _FIELDS if name != "rope_scaling"]  # the same as rope_parameters
    layers = written_layers(shape.layers, names)
    if shape.mrope_sections:
        sections = {"rope_type": "mrope", "mrope_section": list(shape.mrope_sections)}
        layers["rope_parameters"] = {**layers["rope_parameters"], **sections}
    assert shape.mask_token_id is None, "P-EAGLE heads are read only"
    config = written_config("eagle3", "Eagle3Speculator", verifier, architectures, num_speculative_tokens)
    config |= {
        "draft_vocab_size": shape.draft_vocab_size,
        _LAYER_IDS: list(shape.feature_layers),
        "transformer_layer_config": layers,
    }
    config |= {name: getattr(shape, name) for name in _FLAGS}
    if shape.target_hidden_size != shape.hidden_size:
        config["target_hidden_size"] = shape.target_hidden_size
    ids = network.token_ids.cpu()
    used = torch.zeros(shape.vocab_size, dtype=torch.bool)
    used[ids] = True
    state = {name: value for name, value in network.state_dict().items() if own_embedding or name != _EMBEDDING}
    weights = {name: value if dtype is None else value.to(dtype) for name, value in state.items()}
    is_whole = ids.tolist() == list(range(shape.vocab_size))
    # vLLM refuses these tables for a head that drafts the whole vocabulary.
    tables = {} if is_whole else {OFFSETS: ids - torch.arange(len(ids)), "t2d": used}
    files.write_checkpoint(folder, config | dict(extra or {}), weights | tables, None)


def _read(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a head under the names of `Eagle3Network`, with the offsets of draft ids if they exist."""
    found = files.read_tensors(files.weight_file(folder, WEIGHT_NAMES))
    renamed = {name.replace("midlayer.", "layers.0.", 1): value for name, value in found.items()}
    return {name: value for name, value in renamed.items() if not name.endswith(IGNORED)}


def _shape(ref: CheckpointRef, folder: Path, num_target_layers: int) -> Eagle3Shape:
    config = files.read_json(folder)
    if not config:
        raise CheckpointError(f"{folder}: an EAGLE-3 head needs its config.json")
    where = f"{ref.path}: config.json"
    is_speculators = MODEL_TYPE in config
    if is_speculators and config[MODEL_TYPE] not in ("eagle3", _PARALLEL):
        raise CheckpointError(f"{where}: {MODEL_TYPE} is {config[MODEL_TYPE]!r}, which is no EAGLE-3 head")
    if not is_speculators and "draft_vocab_size" not in config:
        raise CheckpointError(
            f"{where}: it has neither {MODEL_TYPE} nor draft_vocab_size, so it describes no EAGLE-3 head; "
            "an EAGLE-1/2 head has drafter kind eagle"
        )
    given = part(config, "transformer_layer_config") if is_speculators else config
    layers, sections = _layer_config(given, where)
    flags = {name: config[name] for name in _FLAGS if config.get(name) is not None}
    if wrong := [name for name, value in flags.items() if not isinstance(value, bool)]:
        raise CheckpointError(f"{where}: {wrong[0]} must be true or false")
    if flags.get("norm_before_fc") and flags.get("fc_norm"):
        raise CheckpointError(f"{where}: norm_before_fc and fc_norm exclude each other")
    draft = whole(config, "draft_vocab_size", where, layers.vocab_size)
    if draft > layers.vocab_size:
        raise CheckpointError(f"{where}: draft_vocab_size is {draft}, above vocab_size {layers.vocab_size}")
    width = whole(config, "target_hidden_size", where, layers.hidden_size)
    layer_ids = _layer_ids(config, where, num_target_layers)
    mask = _mask_token_id(config, where, layers.vocab_size) if config.get(MODEL_TYPE) == _PARALLEL else None
    return Eagle3Shape(layers, draft, width, layer_ids, mrope_sections=sections, mask_token_id=mask, **flags)


def _mask_token_id(config: Mapping[str, Any], where: str, vocab_size: int) -> int:
    """Return the token of P-EAGLE's masks, which its first release calls `ptd_token_id`."""
    given = config.get("mask_token_id", config.get("ptd_token_id"))
    if type(given) is not int or not 0 <= given < vocab_size:
        raise CheckpointError(f"{where}: mask_token_id must be a token below {vocab_size}, not {given!r}")
    return given


def _layer_config(given: Mapping[str, Any], where: str) -> tuple[LlamaConfig, tuple[int, ...]]:
    """Return the configuration of the decoder layers, and the sections of three rotary axes (empty for one axis)."""
    for name in _SIZES:
        whole(given, name, where, None)
    model_type = given.get("model_type", "llama")
    if model_type not in _MODEL_TYPES:
        raise CheckpointError(f"{where}: layers of model_type {model_type!r} are not known; llama and qwen3 are")
    if "sliding_attention" in (given.get("layer_types") or ()):
        raise CheckpointError(f"{where}: layers with sliding attention are not supported")
    num_layers = whole(given, "num_hidden_layers", where, 1)
    if num_layers > MAX_LAYERS:
        raise CheckpointError(f"{where}: {num_layers} layers are above the limit of {MAX_LAYERS}")
    fields = {name: given[name] for name in _FIELDS if given.get(name) is not None} | {"num_hidden_layers": num_layers}
    rope = dict(part(fields, "rope_parameters") or part(fields, "rope_scaling"))
    sections = tuple(rope.get("mrope_section") or ())
    if sections:
        if rope.get("mrope_interleaved"):
            raise CheckpointError(f"{where}: interleaved rotary axes (mrope_interleaved) are not supported")
        theta = rope.get("rope_theta", fields.get("rope_theta", 10000.0))
        fields = {name: value for name, value in fields.items() if not name.startswith("rope_")}
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    try:
        layers = _MODEL_TYPES[model_type](**fields)
    except Exception as error:  # transformers' own strict checks
        raise CheckpointError(f"{where}: it describes no {model_type} layer: {error}") from None
    if sections and 2 * sum(sections) != layers.head_dim:
        raise CheckpointError(f"{where}: mrope_section {list(sections)} does not add up to half of {layers.head_dim}")
    return layers, sections


def _layer_ids(config: Mapping[str, Any], where: str, num_target_layers: int) -> tuple[int, ...]:
    """Return the feature layers as indices of the target's `hidden_states`.

    `speculators` and vLLM store these indices. The `eagle_config` of SpecForge and SGLang stores the layers whose
    outputs are features, one less. The default of all formats is 2, N / 2 and N − 3 of N layers.
    """
    inner = part(config, "eagle_config").get(_LAYER_IDS)
    given = config.get(_LAYER_IDS) if inner is None else inner
    if given is None:
        if num_target_layers < 3:
            raise CheckpointError(
                f"{where}: it names no {_LAYER_IDS}, and the default needs a target of at least 3 layers, not "
                f"{num_target_layers}"
            )
        return 2, num_target_layers // 2, num_target_layers - 3
    shift = 0 if inner is None else 1
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_LAYERS or not all(type(one) is int for one in given):
        raise CheckpointError(f"{where}: {_LAYER_IDS} must list 1 to {MAX_LAYERS} layers")
    indices = tuple(one + shift for one in given)
    if wrong := [one for one in indices if not 0 <= one < num_target_layers]:
        raise CheckpointError(
            f"{where}: {_LAYER_IDS} names the target's state {wrong[0]}, and the target has {num_target_layers} "
            "layers; take a head that was trained for this target"
        )
    return indices


def _check(ref: CheckpointRef, shape: Eagle3Shape, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the tensors of a file have the names and shapes of `shape`, and finite values."""
    with torch.device("meta"):
        expected = files.shapes_of(Eagle3Network(shape, nn.Identity()).state_dict())
    if shape.draft_vocab_size < shape.vocab_size or OFFSETS in tensors:
        expected[OFFSETS] = (shape.draft_vocab_size,)
    if _EMBEDDING not in tensors and shape.target_hidden_size == shape.hidden_size:
        del expected[_EMBEDDING]
    files.expect_shapes(ref.path, files.shapes_of(tensors), expected)
    files.expect_finite(ref.path, tensors)
    draft_token_ids(ref.path, tensors, shape.draft_vocab_size, shape.vocab_size)
