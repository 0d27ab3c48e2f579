"""Checks and loads draft heads for text and image targets, smaller LlamaGen drafters, and the T5 text encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from actors.loading.method import num_drafted_levels
from configs.contexts import CaptionContext
from configs.drafters import (
    BlockDrafter,
    Eagle3Drafter,
    EagleDrafter,
    LayerSkipDrafter,
    MedusaDrafter,
    MsdDrafter,
    VispecDrafter,
)
from configs.load import ConfigError
from configs.method import Method as MethodChoice
from configs.schema import CaptionJob, Checkpoint, Weights
from configs.synthesis import SynthesizeJob, TextEncoder
from models.backends.select import is_on, resolve_device
from models.heads.block import BlockNetwork, BlockShape
from models.heads.block_files import load_block, read_block_shape
from models.heads.eagle import WEIGHT_NAMES as EAGLE_NAMES
from models.heads.eagle import EagleNetwork, load_eagle, read_eagle_shape
from models.heads.eagle3 import Eagle3Network
from models.heads.eagle3_files import load_eagle3, read_eagle3_shape
from models.heads.files import fingerprint, head_folder
from models.heads.medusa import WEIGHT_NAMES as MEDUSA_NAMES
from models.heads.medusa import MedusaHeads, MedusaShape, load_medusa, read_medusa_shape
from models.heads.speculators import WEIGHT_NAMES as SPECULATORS_NAMES
from models.heads.speculators import read_verifier
from models.heads.vision_files import load_vision_head, read_vision_shape
from models.inputs.processing import FrontEnd
from models.llamagen.checkpoints import load_gpt, read_gpt_shape
from models.llamagen.condition import T5Condition, load_t5
from models.llamagen.eagle import load_image_eagle, read_image_eagle_shape
from models.llamagen.eagle3 import load_image_eagle3, read_image_eagle3_shape
from models.llamagen.shape import GptShape
from models.llamagen.target import LlamaGenTarget
from models.loading.checkpoints import CheckpointError, CheckpointRef
from models.target import Target

Found = TypeVar("Found")
Head = EagleNetwork | Eagle3Network | MedusaHeads | BlockNetwork
WHERE = "model.drafter"
ADVICE = "take a head that was trained for this target"


def read_at(where: str, weights: Weights | CaptionContext, read: Callable[[CheckpointRef], Found]) -> Found:
    """Call `read` with a checkpoint's reference; a CheckpointError becomes a ConfigError at the dotted path `where`."""
    runs_code = isinstance(weights, Checkpoint) and weights.allow_remote_code
    try:
        return read(CheckpointRef(weights.path, weights.revision, runs_code))
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from None


def is_head(config: CaptionJob | SynthesizeJob) -> bool:
    """Return whether `model.drafter` is a head for the target, and not an independent model."""
    heads = (EagleDrafter, Eagle3Drafter, VispecDrafter, MsdDrafter, MedusaDrafter, BlockDrafter)
    return isinstance(config.method.drafting.drafter, heads)


def check_head(config: CaptionJob, head: Weights, target: Any, front_end: FrontEnd) -> str:
    """Return a head's revision; raise ConfigError if it is unreadable, or does not fit the text target or the tree."""
    hidden_size = target.get_text_config().hidden_size
    names: Sequence[str] = MEDUSA_NAMES
    kind = config.method.drafting.drafter
    if isinstance(kind, Eagle3Drafter):
        names = SPECULATORS_NAMES
        num_layers = target.get_text_config().num_hidden_layers
        eagle3 = read_at(WHERE, head, lambda ref: read_eagle3_shape(ref, num_layers))
        _check_width(head.path, eagle3.target_hidden_size, hidden_size)
        _check_tokens(head.path, eagle3.vocab_size, front_end)
        _check_verifier(head, target)
    elif isinstance(kind, BlockDrafter):
        names = SPECULATORS_NAMES
        num_layers = target.get_text_config().num_hidden_layers
        _check_block(
            config, head, read_at(WHERE, head, lambda ref: read_block_shape(ref, num_layers)), target, front_end
        )
    elif isinstance(kind, (VispecDrafter, MsdDrafter)):
        names = EAGLE_NAMES
        vision = read_at(WHERE, head, lambda ref: read_vision_shape(ref, kind.kind))
        if not vision.is_for(target.model_type):
            raise ConfigError(
                f"{WHERE}: {head.path} was trained for {vision.model_type}, and the target is {target.model_type}; "
                f"{ADVICE}"
            )
        _check_width(head.path, vision.eagle.llama.hidden_size, hidden_size)
        _check_tokens(head.path, vision.eagle.llama.vocab_size, front_end)
    elif isinstance(kind, EagleDrafter):
        names = EAGLE_NAMES
        eagle = read_at(WHERE, head, read_eagle_shape)
        _check_width(head.path, eagle.llama.hidden_size, hidden_size)
        _check_tokens(head.path, eagle.llama.vocab_size, front_end)
    else:
        medusa = read_at(WHERE, head, read_medusa_shape)
        if medusa is not None:
            _check_medusa(config, head.path, medusa, hidden_size, front_end)
    return read_at(WHERE, head, lambda ref: fingerprint(head_folder(ref, names, weights=False), ref))


def check_image_drafter(config: SynthesizeJob, drafter: Weights, target: GptShape) -> None:
    """Raise ConfigError if a drafter is unreadable, or does not fit the image target or the tree; read no weights."""
    kind = config.method.drafting.drafter
    if isinstance(kind, (VispecDrafter, MsdDrafter)):
        raise ConfigError(
            f"method.drafter.kind: {kind.kind} heads are for models that read images, and the target writes images; "
            "take eagle, eagle3 or medusa"
        )
    if isinstance(kind, EagleDrafter):
        read_at(WHERE, drafter, lambda ref: read_image_eagle_shape(ref, target))
        return
    if isinstance(kind, Eagle3Drafter):
        read_at(WHERE, drafter, lambda ref: read_image_eagle3_shape(ref, target))
        return
    if isinstance(kind, MedusaDrafter):
        heads = read_at(WHERE, drafter, read_medusa_shape)
        if heads is not None:
            _check_medusa(config, drafter.path, heads, target.dim, target)
        return
    shape = read_at(WHERE, drafter, read_gpt_shape)
    for name, what in (
        ("vocab_size", "codes"),
        ("grid", "codes along a side"),
        ("condition", "as its kind of condition"),
        ("num_condition_tokens", "condition positions"),
        ("condition_dim" if target.condition == "text" else "num_classes", "as the size of its condition"),
    ):
        if getattr(shape, name) != getattr(target, name):
            raise ConfigError(
                f"{WHERE}: {drafter.path} has {getattr(shape, name)} {what} ({name}), and the target "
                f"{getattr(target, name)}; drafts would mean other images"
            )


def check_layers(method: MethodChoice, target: str, num_layers: int) -> None:
    """Raise ConfigError unless each drafter `layer_skip` skips some of the `num_layers` layers of `target`, a path."""
    for where, one in method.places.items():
        if not isinstance(one.drafter, LayerSkipDrafter):
            continue
        layers, indices = one.drafter.layers, one.drafter.indices
        if indices[-1] >= num_layers:
            asked = f"the first {layers} layers" if isinstance(layers, int) else f"layer {indices[-1]}"
            raise ConfigError(
                f"{where}.drafter.layers: it names {asked}, and {target} has {num_layers} layers, 0 to "
                f"{num_layers - 1}; name fewer than all of them"
            )
        if len(indices) == num_layers:
            raise ConfigError(
                f"{where}.drafter.layers: it names all {num_layers} layers of {target}, so that a draft would cost as "
                "much as the target; name fewer"
            )


def load_head(config: CaptionJob | SynthesizeJob, target: Target | LlamaGenTarget) -> Head:
    """Load the head onto its target's device. Medusa heads from the hub are compared with the target only here.

    Raises:
        ConfigError: as `check_head`; the weights are damaged, or another device is configured.
    """
    weights, device = config.model.drafter, target.device
    assert weights is not None
    if not is_on(weights.device, device):
        raise ConfigError(f"{WHERE}.device: a head runs where its target does, on {device}, not {weights.device}")
    kind = config.method.drafting.drafter
    if isinstance(kind, Eagle3Drafter):
        return _load_eagle3(weights, target)
    if isinstance(kind, BlockDrafter):
        assert isinstance(target, Target), "the schema refuses block drafters for images"
        num_layers: int = target.decoder.config.num_hidden_layers  # type: ignore[union-attr, assignment]
        return read_at(WHERE, weights, lambda ref: load_block(ref, num_layers, weights.dtype, device))
    if isinstance(kind, (VispecDrafter, MsdDrafter)):
        embedding: Tensor = target.decoder.get_input_embeddings().weight  # type: ignore[operator]
        return read_at(WHERE, weights, lambda ref: load_vision_head(ref, kind.kind, embedding, weights.dtype, device))
    if not isinstance(kind, EagleDrafter):
        heads = read_at(WHERE, weights, lambda ref: load_medusa(ref, weights.dtype, device))
        tokens = target.front_end if isinstance(target, Target) else target.gpt.shape
        _check_medusa(config, weights.path, heads.shape, target.hidden_size, tokens)
        return heads
    if isinstance(target, LlamaGenTarget):
        shape = target.gpt.shape
        return read_at(WHERE, weights, lambda ref: load_image_eagle(ref, shape, weights.dtype, device))
    return read_at(WHERE, weights, lambda ref: load_eagle(ref, weights.dtype, device))


def _load_eagle3(weights: Weights, target: Target | LlamaGenTarget) -> Eagle3Network:
    if isinstance(target, LlamaGenTarget):
        gpt, device = target.gpt, target.device
        return read_at(WHERE, weights, lambda ref: load_image_eagle3(ref, gpt, weights.dtype, device))
    embedding: Tensor = target.decoder.get_input_embeddings().weight  # type: ignore[operator]
    num_layers: int = target.decoder.config.num_hidden_layers  # type: ignore[union-attr, assignment]
    options = (num_layers, embedding, weights.dtype, target.device)
    return read_at(WHERE, weights, lambda ref: load_eagle3(ref, *options))


def load_gpt_target(where: str, weights: Weights, guided: bool) -> LlamaGenTarget:
    """Load a LlamaGen model as a target or as a drafter; with `guided` it also decodes an unconditional lane."""
    gpt = read_at(where, weights, lambda ref: load_gpt(ref, weights.dtype, resolve_device(weights.device)))
    return LlamaGenTarget(gpt, None, guided, weights.path)


def load_text_encoder(where: str, encoder: TextEncoder, shape: GptShape) -> T5Condition:
    """Load the T5 encoder that encodes prompts for a target of this shape."""
    options = (encoder.dtype, resolve_device(encoder.device), encoder.truncate)
    return read_at(where, encoder, lambda ref: load_t5(ref, shape, *options))


def _check_medusa(
    config: CaptionJob | SynthesizeJob, path: str, heads: MedusaShape, hidden_size: int, tokens: FrontEnd | GptShape
) -> None:
    _check_width(path, heads.hidden_size, hidden_size)
    if isinstance(tokens, FrontEnd):
        _check_tokens(path, heads.vocab_size, tokens)
    elif heads.vocab_size != tokens.vocab_size:
        raise ConfigError(
            f"{WHERE}: {path} knows {heads.vocab_size} codes, and the target {tokens.vocab_size}; {ADVICE}"
        )
    levels = num_drafted_levels(config.method, "medusa")
    if levels > heads.num_heads:
        raise ConfigError(
            f"method.tree: it drafts {levels} levels deep, and model.drafter has {heads.num_heads} Medusa heads, one "
            "per level; take a shallower tree"
        )


def _check_block(config: CaptionJob, head: Weights, shape: BlockShape, target: Any, front_end: FrontEnd) -> None:
    text = target.get_text_config()
    _check_width(head.path, shape.hidden_size, text.hidden_size)
    _check_tokens(head.path, shape.vocab_size, front_end)
    if shape.vocab_size > text.vocab_size:
        raise ConfigError(
            f"{WHERE}: {head.path} has a vocabulary of {shape.vocab_size} tokens, and the target of "
            f"{text.vocab_size}; {ADVICE}"
        )
    _check_verifier(head, target)
    levels = num_drafted_levels(config.method, "block")
    if levels > shape.max_levels:
        raise ConfigError(
            f"method.tree: it drafts {levels} levels deep, and a block of model.drafter has {shape.max_levels} drafts; "
            "take a shallower tree"
        )


def _check_width(path: str, width: int, needed: int) -> None:
    if width != needed:
        raise ConfigError(
            f"{WHERE}: {path} reads states of width {width}, and the target's are {needed} wide; {ADVICE}"
        )


def _check_verifier(head: Weights, target: Any) -> None:
    """Check that the target has the architecture that the head's file names, if it names one."""
    needed = read_at(WHERE, head, read_verifier)
    given = tuple(target.architectures or ())
    if needed and given and not set(needed) & set(given):
        raise ConfigError(
            f"{WHERE}: {head.path} was trained for {' or '.join(needed)}, and the target is {given[0]}; {ADVICE}"
        )


def _check_tokens(path: str, num_tokens: int, front_end: FrontEnd) -> None:
    """Check that a head has all tokens of the target except special ones (image placeholders, padding)."""
    tokenizer = front_end.tokenizer
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    missing = sorted(
        number for number in tokenizer.get_vocab().values() if number >= num_tokens and number not in special
    )
    if missing:
        raise ConfigError(
            f"{WHERE}: {path} knows {num_tokens} tokens, and {len(missing)} of the target's words lie beyond, e.g. id "
            f"{missing[0]}; {ADVICE}"
        )
