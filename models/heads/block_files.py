"""Read and write files of block drafters: the format of z-lab's DFlash, and that of `speculators`.

Both store the same network. DFlash stores target layers whose *outputs* are features, speculators their indices in
transformers' `hidden_states`, one more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from models.heads import files
from models.heads.block import BlockNetwork, BlockShape, View
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
from models.loading.inspection import LENGTH_DEPENDENT

MAX_BLOCK_SIZE = 128
"""Most tokens of a block."""
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
_FIELDS = (
    *_SIZES,
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "max_position_embeddings", "attention_bias"),
    *("rope_parameters", "rope_theta", "rope_scaling"),
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_DFLASH = "dflash_config"


def read_block_shape(ref: CheckpointRef, num_target_layers: int) -> BlockShape:
    """Read the shape of a checkpoint for a target with `num_target_layers` layers.

    For a local folder, it is compared with the weights, whose values must be finite. Raises CheckpointError.
    """
    shape = _shape(ref, num_target_layers)
    return _check(ref, shape, _read(ref)) if ref.is_folder else shape


def load_block(ref: CheckpointRef, num_target_layers: int, dtype: str, device: torch.device) -> BlockNetwork:
    """Load a block drafter in evaluation mode; `dtype` is a key of `DTYPES`, or "auto" for the stored type.

    Raises CheckpointError.
    """
    shape, tensors = _shape(ref, num_target_layers), _read(ref)
    shape = _check(ref, shape, tensors)
    network = BlockNetwork(shape)
    network.token_ids = draft_token_ids(ref.path, tensors, shape.draft_vocab_size, shape.vocab_size)
    network.load_state_dict({name: value for name, value in tensors.items() if name != OFFSETS}, strict=True)
    network.to(device=device, dtype=DTYPES.get(dtype, tensors["fc.weight"].dtype))
    return network.requires_grad_(False).eval()


def save_block(
    network: BlockNetwork,
    folder: Path,
    verifier: str,
    architectures: Sequence[str],
    dtype: torch.dtype | None = None,
) -> None:
    """Write `config.json` and `model.safetensors` in the format of `speculators`.

    `verifier` is the target's path or hub id, with its `architectures`. The embedding and the output layer are the
    target's, and are not written.
    """
    shape = network.shape
    assert not shape.has_embedding, "a trained block drafter uses the target's embedding"
    assert not shape.has_head, "a trained block drafter uses the target's output layer"
    assert not shape.views, "a trained block drafter reads everything"
    config = written_config("dflash", "DFlashDraftModel", verifier, architectures, shape.max_levels)
    names = [name for name in _FIELDS if name not in ("rope_theta", "rope_scaling")]
    config |= {
        "draft_vocab_size": shape.draft_vocab_size,
        "aux_hidden_state_layer_ids": list(shape.feature_layers),
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": False,
        "transformer_layer_config": written_layers(shape.layers, [*names, "num_hidden_layers"]),
    }
    files.write_checkpoint(folder, config, network.state_dict(), dtype)


def _read(ref: CheckpointRef) -> dict[str, Tensor]:
    found = files.read_tensors(files.weight_file(files.head_folder(ref, WEIGHT_NAMES), WEIGHT_NAMES))
    return {name: value for name, value in found.items() if not name.endswith(IGNORED)}


def _shape(ref: CheckpointRef, num_target_layers: int) -> BlockShape:
    folder = files.head_folder(ref, WEIGHT_NAMES, weights=False)
    config = files.read_json(folder)
    if not config:
        raise CheckpointError(f"{folder}: a block drafter needs its config.json")
    where = f"{ref.path}: config.json"
    if MODEL_TYPE in config and config[MODEL_TYPE] != "dflash":
        raise CheckpointError(f"{where}: {MODEL_TYPE} is {config[MODEL_TYPE]!r}, which is no block drafter (dflash)")
    if MODEL_TYPE not in config and _DFLASH not in config:
        raise CheckpointError(f"{where}: it has neither {_DFLASH} nor {MODEL_TYPE}, so it describes no block drafter")
    if config.get("sample_from_anchor"):
        raise CheckpointError(f"{where}: sample_from_anchor is not supported: the pending token predicts no draft")
    is_speculators = MODEL_TYPE in config
    # Newer files of DFlash have the block size inside.
    options = config if is_speculators or config.get("block_size") is not None else part(config, _DFLASH)
    inner = part(config, "transformer_layer_config") if is_speculators else config
    layers = _layer_config(inner, where)
    views = _views(inner, config, layers.num_hidden_layers, where)
    feature_layers = _feature_layers(config, where, num_target_layers)
    block_size = whole(options, "block_size", where, None)
    if not 2 <= block_size <= MAX_BLOCK_SIZE:
        raise CheckpointError(f"{where}: block_size is {block_size}, and must be 2 to {MAX_BLOCK_SIZE}")
    mask = (config if is_speculators else part(config, _DFLASH)).get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < layers.vocab_size:
        raise CheckpointError(
            f"{where}: mask_token_id is {mask!r}, and must be one of the {layers.vocab_size} tokens of vocab_size"
        )
    num_drafted = whole(config, "draft_vocab_size", where, layers.vocab_size) if is_speculators else layers.vocab_size
    if num_drafted > layers.vocab_size:
        raise CheckpointError(f"{where}: draft_vocab_size is {num_drafted}, above vocab_size {layers.vocab_size}")
    return BlockShape(layers, feature_layers, block_size, mask, num_drafted, views=views)


def _views(given: Mapping[str, Any], config: Mapping[str, Any], num_layers: int, where: str) -> tuple[View, ...]:
    """Return what each layer reads; empty if every layer reads everything.

    In the format of speculators, layers with a window are causal inside the block unless `sliding_window_non_causal`,
    and their window ends at the pending token (`create_anchor_block_mask_mod` of its code). In the format of DFlash,
    the rules are those of vLLM (`_resolve_layer_attention` of its `qwen3_dflash`).
    """
    dflash = part(config, _DFLASH)
    types = given.get("layer_types") or ()
    if set(types) - {_FULL, _SLIDING} or (types and len(types) != num_layers):
        raise CheckpointError(f"{where}: layer_types must name {_FULL} or {_SLIDING} for each of {num_layers} layers")
    if given.get("use_sliding_window") and not types:
        raise CheckpointError(f"{where}: use_sliding_window needs layer_types")
    named = [one == _SLIDING for one in types] or [False] * num_layers
    slides = named if any(named) or not dflash.get("use_swa") else [True] * num_layers
    is_used = given.get("use_sliding_window") is not False
    window = dflash.get("swa_window_size", given.get("sliding_window") if is_used else None)
    if any(slides) and (type(window) is not int or window < 1):
        raise CheckpointError(f"{where}: layers with sliding attention need sliding_window, and it is {window!r}")
    if MODEL_TYPE in config:
        is_causal = [one and not config.get("sliding_window_non_causal") for one in slides]
    else:
        given_causal = next((one for one in (config.get("is_causal"), dflash.get("causal")) if one is not None), None)
        is_causal = named if given_causal is None else [bool(given_causal)] * num_layers
    views = tuple(
        View(window if one else None, causal, from_anchor=one and MODEL_TYPE in config)
        for one, causal in zip(slides, is_causal, strict=True)
    )
    return views if set(views) != {View()} else ()


def _layer_config(given: Mapping[str, Any], where: str) -> Qwen3Config:
    for name in _SIZES:
        whole(given, name, where, None)
    num_layers = whole(given, "num_hidden_layers", where, None)
    if num_layers > MAX_LAYERS:
        raise CheckpointError(f"{where}: {num_layers} layers are above the limit of {MAX_LAYERS}")
    fields = {name: given[name] for name in _FIELDS if given.get(name) is not None}
    rope = part(fields, "rope_parameters") or part(fields, "rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in LENGTH_DEPENDENT or rope.get("mrope_section"):
        raise CheckpointError(f"{where}: rotary positions of type {kind} with these options are not supported")
    try:
        return Qwen3Config(**fields, num_hidden_layers=num_layers)
    except Exception as error:  # transformers' own strict checks
        raise CheckpointError(f"{where}: it describes no Qwen3 layer: {error}") from None


def _feature_layers(config: Mapping[str, Any], where: str, num_target_layers: int) -> tuple[int, ...]:
    """Return the feature layers as indices of the target's `hidden_states`; the last one is behind the final norm."""
    dflash = part(config, _DFLASH)
    name, shift = ("aux_hidden_state_layer_ids", 0) if MODEL_TYPE in config else ("target_layer_ids", 1)
    given = config.get(name) if MODEL_TYPE in config else dflash.get(name)
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_LAYERS or not all(type(one) is int for one in given):
        raise CheckpointError(f"{where}: {name} must list 1 to {MAX_LAYERS} layers of the target")
    trained = config.get("num_target_layers")
    wrong = [one for one in given if not 0 <= one + shift <= num_target_layers or one < 0]
    if wrong or (trained is not None and trained != num_target_layers):
        problem = f"{name} names layer {wrong[0]}" if wrong else f"num_target_layers is {trained}"
        raise CheckpointError(
            f"{where}: {problem}, and the target has {num_target_layers} layers; take a drafter that was trained for "
            "this target"
        )
    return tuple(one + shift for one in given)


def _check(ref: CheckpointRef, shape: BlockShape, tensors: Mapping[str, Tensor]) -> BlockShape:
    """Return the shape with the parts that the file has.

    Raises CheckpointError unless its tensors have the names and shapes of the network, and finite values.
    """
    has_head = _HEAD in tensors or shape.draft_vocab_size < shape.vocab_size
    shape = replace(shape, has_embedding=_EMBEDDING in tensors, has_head=has_head)
    with torch.device("meta"):
        expected = files.shapes_of(BlockNetwork(shape).state_dict())
    if shape.draft_vocab_size < shape.vocab_size or OFFSETS in tensors:
        expected[OFFSETS] = (shape.draft_vocab_size,)
    files.expect_shapes(ref.path, files.shapes_of(tensors), expected)
    files.expect_finite(ref.path, tensors)
    draft_token_ids(ref.path, tensors, shape.draft_vocab_size, shape.vocab_size)
    return shape
