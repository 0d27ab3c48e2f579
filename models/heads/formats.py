"""List the published layouts of draft heads: how `config.json` becomes a shape, and which tensors a file has.

EAGLE, ViSpec and MSD heads have the layout of EAGLE-1/2. EAGLE-3 has two layouts: that of `speculators`, and the Llama
format of EAGLE and SpecForge; P-EAGLE has the first. Block drafters have the layout of z-lab's DFlash, or that of
`speculators`. `models.heads.loader` applies the rows, `models.heads.writer` writes files.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

from models.heads.block import BlockNetwork, BlockShape, View
from models.heads.config import MODEL_TYPE, HeadConfig
from models.heads.eagle import EagleNetwork, EagleShape
from models.heads.eagle3 import Eagle3Network, Eagle3Shape
from models.heads.loader import EMBEDDING, TABLES, HeadFormat, Shapes
from models.heads.medusa import MedusaHeads, MedusaShape
from models.heads.vision import FAMILIES, MsdNetwork, VisionKind, VisionShape, VispecNetwork
from models.loading.checkpoints import CheckpointError
from models.loading.inspection import LENGTH_DEPENDENT

MAX_BLOCK_SIZE = 128
"""Maximum number of tokens of a block."""
MAX_QUERIES = 256
"""Maximum number of queries of an adaptor of ViSpec; the public heads have two."""
EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_PARALLEL, _DFLASH = "peagle", "dflash_config"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_QUERIES = "imadpt.q"
_UNUSED = (*TABLES, "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Redundant tensors that training stores: parts of the target, and tables from the configuration."""
_VISION_NAMES: dict[VisionKind, str] = {"vispec": "ViSpec", "msd": "MSD"}
_SIGNS = (
    ("eagle3", "an EAGLE-3 head", ("midlayer.", "d2t", "t2d")),
    ("vispec", "a ViSpec head", ("imadpt.", "img_fc.")),
)
"""Drafter kind, name, and first letters of the tensors that only this kind has."""
_MEDUSA_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")


def _fit_eagle(kind: str, shape: EagleShape, shapes: Shapes, path: str) -> EagleShape:
    for other, what, signs in _SIGNS:
        if other != kind and any(name.startswith(signs) for name in shapes):
            raise CheckpointError(f"{path}: this is {what}; set method.drafter.kind to {other}")
    return shape


def _vision(kind: VisionKind, config: HeadConfig, _: int) -> VisionShape:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{config.path}: config.json gives model_type {model_type!r}; there are {_VISION_NAMES[kind]} heads for "
            f"{', '.join(FAMILIES)}, and other EAGLE-1/2 heads have drafter kind eagle"
        )
    is_qwen = kind == "msd" and FAMILIES[model_type] != "llava"
    # A head's positions count its pairs, so that three rotary axes are equal.
    data = {**config, **config.one_axis(), **({"qkv_bias": True} if is_qwen else {})}
    shape = EagleShape.of(data, config.path)
    return VisionShape(shape.layers, shape.bias, shape.qkv_bias, is_qwen, model_type)


def _fit_vispec(shape: VisionShape, shapes: Shapes, path: str) -> VisionShape:
    _fit_eagle("vispec", shape, shapes, path)
    if _QUERIES not in shapes:
        raise CheckpointError(
            f"{path}: it has no {_QUERIES}, so it is no ViSpec head; MSD and EAGLE-1/2 heads have drafter kind "
            "msd and eagle"
        )
    queries = shapes[_QUERIES]
    if len(queries) != 3 or not 1 <= queries[0] <= MAX_QUERIES:
        raise CheckpointError(
            f"{path}: {_QUERIES} has shape {list(queries)}; it must hold 1 to {MAX_QUERIES} queries by head and "
            "dimension"
        )
    return replace(shape, num_queries=queries[0])


def _eagle3(config: HeadConfig, num_target_layers: int) -> Eagle3Shape:
    kind = config.get(MODEL_TYPE)
    if MODEL_TYPE in config and kind not in ("eagle3", _PARALLEL):
        raise config.error(f"{MODEL_TYPE} is {kind!r}, which is no EAGLE-3 head")
    if not kind and "draft_vocab_size" not in config:
        raise config.error(
            f"it has neither {MODEL_TYPE} nor draft_vocab_size, so it describes no EAGLE-3 head; an EAGLE-1/2 head has "
            "drafter kind eagle"
        )
    given = config.part("transformer_layer_config") if kind else config
    if _SLIDING in (given.get("layer_types") or ()):
        raise config.error("layers with sliding attention are not supported")
    sections = tuple(given.rope().get("mrope_section") or ())
    interleaved = given.rope().get("mrope_interleaved") or False
    if interleaved is not False and (interleaved is not True or len(sections) != 3):
        raise config.error("mrope_interleaved must be true or false, and needs an mrope_section of three axes")
    num_layers = given.whole("num_hidden_layers", 1)
    layers = given.layers(given.get("model_type", "llama"), num_layers, **given.one_axis())
    if sections and 2 * sum(sections) != layers.head_dim:
        raise config.error(f"mrope_section {list(sections)} does not add up to half of {layers.head_dim}")
    flags = config.flags(*EAGLE3_FLAGS)
    if flags.get("norm_before_fc") and flags.get("fc_norm"):
        raise config.error("norm_before_fc and fc_norm exclude each other")
    mask = config.get("mask_token_id", config.get("ptd_token_id")) if kind == _PARALLEL else None  # its first release
    if kind == _PARALLEL and (type(mask) is not int or not 0 <= mask < layers.vocab_size):
        raise config.error(f"mask_token_id must be a token below {layers.vocab_size}, not {mask!r}")
    width = config.whole("target_hidden_size", layers.hidden_size)
    draft_vocab_size, features = config.drafted(layers.vocab_size), _eagle3_features(config, num_target_layers)
    options: dict[str, Any] = {"mrope_sections": sections, "mrope_interleaved": interleaved, **flags}
    return Eagle3Shape(layers, draft_vocab_size, width, features, mask_token_id=mask, **options)


def _eagle3_features(config: HeadConfig, num_target_layers: int) -> tuple[int, ...]:
    """Return the feature layers as indices of the target's `hidden_states`.

    `speculators` and vLLM store these indices. The `eagle_config` of SpecForge and SGLang stores the layers whose
    outputs are features, one less. The default of all formats is 2, N / 2 and N − 3 of N layers.
    """
    inner = config.part("eagle_config").get(LAYER_IDS)
    given = config.get(LAYER_IDS) if inner is None else inner
    if given is None:
        if num_target_layers < 3:
            raise config.error(
                f"it names no {LAYER_IDS}, and the default needs a target of at least 3 layers, not {num_target_layers}"
            )
        return 2, num_target_layers // 2, num_target_layers - 3
    shift = 0 if inner is None else 1
    indices = tuple(layer + shift for layer in config.layer_list(LAYER_IDS, given))
    if wrong := [index for index in indices if not 0 <= index < num_target_layers]:
        raise config.error(
            f"{LAYER_IDS} names the target's state {wrong[0]}, and the target has {num_target_layers} layers; take a "
            "head that was trained for this target"
        )
    return indices


def _block(config: HeadConfig, num_target_layers: int) -> BlockShape:
    is_speculators, dflash = MODEL_TYPE in config, config.part(_DFLASH)
    if is_speculators and config.get(MODEL_TYPE) != "dflash":
        raise config.error(f"{MODEL_TYPE} is {config.get(MODEL_TYPE)!r}, which is no block drafter (dflash)")
    if not is_speculators and _DFLASH not in config:
        raise config.error(f"it has neither {_DFLASH} nor {MODEL_TYPE}, so it describes no block drafter")
    if config.get("sample_from_anchor"):
        raise config.error("sample_from_anchor is not supported: the pending token predicts no draft")
    given = config.part("transformer_layer_config") if is_speculators else config
    rope = given.rope()
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in LENGTH_DEPENDENT or rope.get("mrope_section"):
        raise config.error(f"rotary positions of type {kind} with these options are not supported")
    layers = given.layers("qwen3", given.whole("num_hidden_layers"))
    # Newer files of DFlash have the block size inside.
    options = config if is_speculators or config.get("block_size") is not None else dflash
    block_size = options.whole("block_size")
    if not 2 <= block_size <= MAX_BLOCK_SIZE:
        raise config.error(f"block_size is {block_size}, and must be 2 to {MAX_BLOCK_SIZE}")
    mask = (config if is_speculators else dflash).get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < layers.vocab_size:
        raise config.error(
            f"mask_token_id is {mask!r}, and must be one of the {layers.vocab_size} tokens of vocab_size"
        )
    drafted = config.drafted(layers.vocab_size) if is_speculators else layers.vocab_size
    features = _block_features(config, num_target_layers)
    return BlockShape(layers, features, block_size, mask, drafted, views=_views(given, config, layers))


def _block_features(config: HeadConfig, num_target_layers: int) -> tuple[int, ...]:
    """Return the feature layers as indices of the target's `hidden_states`; the last one is behind the final norm.

    DFlash stores target layers whose *outputs* are features, one less.
    """
    is_speculators = MODEL_TYPE in config
    name, shift = ("aux_hidden_state_layer_ids", 0) if is_speculators else ("target_layer_ids", 1)
    given = config.layer_list(name, (config if is_speculators else config.part(_DFLASH)).get(name))
    trained = config.get("num_target_layers")
    wrong = [layer for layer in given if not 0 <= layer <= num_target_layers - shift]
    if wrong or (trained is not None and trained != num_target_layers):
        problem = f"{name} names layer {wrong[0]}" if wrong else f"num_target_layers is {trained}"
        raise config.error(
            f"{problem}, and the target has {num_target_layers} layers; take a drafter that was trained for this target"
        )
    return tuple(layer + shift for layer in given)


def _views(given: HeadConfig, config: HeadConfig, layers: Any) -> tuple[View, ...]:
    """Return what each layer reads; empty if every layer reads everything.

    In the format of speculators, layers with a window are causal inside the block unless `sliding_window_non_causal`,
    and their window ends at the pending token (`create_anchor_block_mask_mod` of its code). In the format of DFlash,
    the rules are those of vLLM (`_resolve_layer_attention` of its `qwen3_dflash`).
    """
    num_layers, dflash = layers.num_hidden_layers, config.part(_DFLASH)
    types = given.get("layer_types") or ()
    if set(types) - {_FULL, _SLIDING} or (types and len(types) != num_layers):
        raise config.error(f"layer_types must name {_FULL} or {_SLIDING} for each of {num_layers} layers")
    if given.get("use_sliding_window") and not types:
        raise config.error("use_sliding_window needs layer_types")
    named = [kind == _SLIDING for kind in types] or [False] * num_layers
    slides = named if any(named) or not dflash.get("use_swa") else [True] * num_layers
    is_used = given.get("use_sliding_window") is not False
    window = dflash.get("swa_window_size", given.get("sliding_window") if is_used else None)
    if any(slides) and (type(window) is not int or window < 1):
        raise config.error(f"layers with sliding attention need sliding_window, and it is {window!r}")
    if MODEL_TYPE in config:
        is_causal = [is_sliding and not config.get("sliding_window_non_causal") for is_sliding in slides]
    else:
        given_causal = next(
            (value for value in (config.get("is_causal"), dflash.get("causal")) if value is not None), None
        )
        is_causal = named if given_causal is None else [bool(given_causal)] * num_layers
    views = tuple(
        View(window if is_sliding else None, causal, from_anchor=is_sliding and MODEL_TYPE in config)
        for is_sliding, causal in zip(slides, is_causal, strict=True)
    )
    return views if set(views) != {View()} else ()


def _fit_block(shape: BlockShape, shapes: Shapes, path: str) -> BlockShape:
    has_head = "lm_head.weight" in shapes or shape.draft_vocab_size < shape.vocab_size
    return replace(shape, has_embedding=EMBEDDING in shapes, has_head=has_head)


def _fit_medusa(_: None, shapes: Shapes, path: str) -> MedusaShape:
    blocks = [tuple(map(int, match.groups())) for name in shapes if (match := _MEDUSA_BLOCK.fullmatch(name))]
    if not blocks:
        raise CheckpointError(f"{path}: it holds no tensor named like 0.0.linear.weight, so no Medusa head")
    num_heads, num_blocks = (1 + max(numbers) for numbers in zip(*blocks, strict=True))
    last = shapes.get(f"0.{num_blocks}.weight", ())
    if len(last) != 2:
        raise CheckpointError(f"{path}: head 0 has {num_blocks} block(s), so 0.{num_blocks}.weight must be (V, D)")
    return MedusaShape(num_heads, num_blocks, last[1], last[0])


_MEDUSA_NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")

EAGLE = HeadFormat(
    needs="an EAGLE head needs its",
    read=lambda config, _: EagleShape.of(config, config.path),
    network=EagleNetwork,
    fit=partial(_fit_eagle, "eagle"),
    checks_values=False,
)
VISPEC = HeadFormat(
    needs="ViSpec heads need their",
    read=partial(_vision, "vispec"),
    network=lambda shape: VispecNetwork(shape, shape.num_queries),
    fit=_fit_vispec,
    borrows=lambda _: True,
)
MSD = HeadFormat(
    needs="MSD heads need their",
    read=partial(_vision, "msd"),
    network=MsdNetwork,
    fit=partial(_fit_eagle, "msd"),
    borrows=lambda _: True,
)
EAGLE3: HeadFormat[Eagle3Shape, Eagle3Network] = HeadFormat(
    needs="an EAGLE-3 head needs its",
    read=_eagle3,
    network=Eagle3Network,
    renamed=("midlayer.", "layers.0."),
    ignored=_UNUSED,
    borrows=lambda shape: shape.target_hidden_size == shape.hidden_size,
)
BLOCK = HeadFormat(
    needs="a block drafter needs its",
    read=_block,
    network=BlockNetwork,
    fit=_fit_block,
    ignored=_UNUSED,
)
MEDUSA = HeadFormat(
    needs=None,
    read=lambda *_: None,
    network=MedusaHeads,
    fit=_fit_medusa,
    names=_MEDUSA_NAMES,
    downloaded=_MEDUSA_NAMES[:2],
    prefix="medusa_head.",
    checks_values=False,
    first="0.0.linear.weight",
)
FORMATS: dict[str, HeadFormat[Any, Any]] = {
    "eagle": EAGLE, "vispec": VISPEC, "msd": MSD, "eagle3": EAGLE3, "block": BLOCK, "medusa": MEDUSA
}  # fmt: skip
"""The format of each kind of `method.drafter` that is a head for the target."""
