"""Checks and loads draft heads for text and image targets, smaller LlamaGen drafters, and the T5 text encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from actors.loading.method import num_drafted_levels
from configs.contexts import CaptionContextConfig
from configs.drafters import (
    Eagle3DrafterConfig,
    EagleDrafterConfig,
    LayerSkipDrafterConfig,
    MedusaDrafterConfig,
    MsdDrafterConfig,
    VispecDrafterConfig,
)
from configs.load import ConfigError
from configs.method import MethodConfig
from configs.schema import CaptionJobConfig, CheckpointConfig, WeightsConfig
from configs.synthesis import SynthesizeJobConfig, TextEncoderConfig
from models.backends.select import is_on, resolve_device
from models.heads.block import BlockNetwork, BlockShape
from models.heads.eagle import EagleNetwork
from models.heads.eagle3 import Eagle3Network
from models.heads.files import fingerprint, head_folder
from models.heads.formats import FORMATS, MEDUSA
from models.heads.loader import load_head as load
from models.heads.loader import read_shape, read_verifier
from models.heads.medusa import MedusaHeads, MedusaShape
from models.heads.vision import VisionShape
from models.inputs.processing import FrontEnd
from models.llamagen.checkpoints import load_gpt, read_gpt_shape
from models.llamagen.condition import T5Condition, load_t5
from models.llamagen.eagle import image_head
from models.llamagen.shape import GptShape
from models.llamagen.target import LlamaGenTarget
from models.loading.checkpoints import CheckpointError, CheckpointRef
from models.target import Target

Found = TypeVar("Found")
Head = EagleNetwork | Eagle3Network | MedusaHeads | BlockNetwork
WHERE = "model.drafter"
ADVICE = "take a head that was trained for this target"


def read_at(where: str, weights: WeightsConfig | CaptionContextConfig, read: Callable[[CheckpointRef], Found]) -> Found:
    """Call `read` with a checkpoint's reference; a CheckpointError becomes a ConfigError at the dotted path `where`."""
    runs_code = isinstance(weights, CheckpointConfig) and weights.allow_remote_code
    try:
        return read(CheckpointRef(weights.path, weights.revision, runs_code))
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from None


def is_head(config: CaptionJobConfig | SynthesizeJobConfig) -> bool:
    """Return whether `model.drafter` is a head for the target, and not an independent model."""
    return config.method.drafting.drafter.kind in FORMATS


def check_head(config: CaptionJobConfig, head: WeightsConfig, target: Any, front_end: FrontEnd) -> str:
    """Return a head's revision; raise ConfigError if it is unreadable, or does not fit the text target or the tree."""
    text = target.get_text_config()
    kind = FORMATS[config.method.drafting.drafter.kind]
    shape = read_at(WHERE, head, lambda ref: read_shape(kind, ref, text.num_hidden_layers))
    if isinstance(shape, VisionShape) and not shape.is_for(target.model_type):
        raise ConfigError(
            f"{WHERE}: {head.path} was trained for {shape.model_type}, and the target is {target.model_type}; {ADVICE}"
        )
    if shape is not None:
        _check_fit(config, head.path, shape, text.hidden_size, front_end)
    if isinstance(shape, BlockShape) and shape.vocab_size > text.vocab_size:
        raise ConfigError(
            f"{WHERE}: {head.path} has a vocabulary of {shape.vocab_size} tokens, and the target of "
            f"{text.vocab_size}; {ADVICE}"
        )
    _check_verifier(head, target)
    return read_at(WHERE, head, lambda ref: fingerprint(head_folder(ref, (), weights=False), ref))


def check_image_drafter(config: SynthesizeJobConfig, drafter: WeightsConfig, target: GptShape) -> None:
    """Raise ConfigError if a drafter is unreadable, or does not fit the image target or the tree; read no weights."""
    kind = config.method.drafting.drafter
    if isinstance(kind, (VispecDrafterConfig, MsdDrafterConfig)):
        raise ConfigError(
            f"method.drafter.kind: {kind.kind} heads are for models that read images, and the target writes images; "
            "take eagle, eagle3 or medusa"
        )
    if isinstance(kind, (EagleDrafterConfig, Eagle3DrafterConfig)):
        head = image_head(FORMATS[kind.kind], target)
        read_at(WHERE, drafter, lambda ref: read_shape(head, ref, target.num_layers))
        return
    if isinstance(kind, MedusaDrafterConfig):
        heads = read_at(WHERE, drafter, lambda ref: read_shape(MEDUSA, ref))
        if heads is not None:
            _check_fit(config, drafter.path, heads, target.dim, target)
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


def check_layers(method: MethodConfig, target: str, num_layers: int) -> None:
    """Raise ConfigError unless each drafter `layer_skip` skips some of the `num_layers` layers of `target`, a path."""
    for where, section in method.places.items():
        if not isinstance(section.drafter, LayerSkipDrafterConfig):
            continue
        layers, indices = section.drafter.layers, section.drafter.indices
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


def load_head(config: CaptionJobConfig | SynthesizeJobConfig, target: Target | LlamaGenTarget) -> Head:
    """Load the head onto its target's device. Medusa heads from the hub are compared with the target only here.

    Raises:
        ConfigError: as `check_head`; the weights are damaged, or another device is configured.
    """
    weights, device = config.model.drafter, target.device
    assert weights is not None
    if not is_on(weights.device, device):
        raise ConfigError(f"{WHERE}.device: a head runs where its target does, on {device}, not {weights.device}")
    kind = FORMATS[config.method.drafting.drafter.kind]
    if isinstance(target, LlamaGenTarget):
        shape = target.gpt.shape
        num_layers, embedding = shape.num_layers, target.gpt.embed_tokens.weight
        kind = image_head(kind, shape)
    else:
        decoder: Any = target.decoder
        num_layers, embedding = decoder.config.num_hidden_layers, decoder.get_input_embeddings().weight
    head: Head = read_at(WHERE, weights, lambda ref: load(kind, ref, weights.dtype, device, num_layers, embedding))
    if isinstance(head, MedusaHeads):
        tokens = target.front_end if isinstance(target, Target) else target.gpt.shape
        _check_fit(config, weights.path, head.shape, target.hidden_size, tokens)
    return head


def load_gpt_target(where: str, weights: WeightsConfig, guided: bool) -> LlamaGenTarget:
    """Load a LlamaGen model as a target or as a drafter; with `guided` it also decodes an unconditional lane."""
    gpt = read_at(where, weights, lambda ref: load_gpt(ref, weights.dtype, resolve_device(weights.device)))
    return LlamaGenTarget(gpt, None, guided, weights.path)


def load_text_encoder(where: str, encoder: TextEncoderConfig, shape: GptShape) -> T5Condition:
    """Load the T5 encoder that encodes prompts for a target of this shape."""
    options = (encoder.dtype, resolve_device(encoder.device), encoder.truncate)
    return read_at(where, encoder, lambda ref: load_t5(ref, shape, *options))


def _check_fit(
    config: CaptionJobConfig | SynthesizeJobConfig, path: str, shape: Any, state_size: int, tokens: FrontEnd | GptShape
) -> None:
    """Check that a head reads the target's states, has its tokens, and drafts as deep as the tree."""
    if shape.state_size != state_size:
        raise ConfigError(
            f"{WHERE}: {path} reads states of width {shape.state_size}, and the target's are {state_size} wide; "
            f"{ADVICE}"
        )
    if isinstance(tokens, FrontEnd):
        _check_tokens(path, shape.vocab_size, tokens)
    elif shape.vocab_size != tokens.vocab_size:
        raise ConfigError(
            f"{WHERE}: {path} knows {shape.vocab_size} codes, and the target {tokens.vocab_size}; {ADVICE}"
        )
    if isinstance(shape, MedusaShape):
        kind, most = "medusa", shape.num_heads
        limit = f"model.drafter has {most} Medusa heads, one per level"
    elif isinstance(shape, BlockShape):
        kind, most = "block", shape.max_levels
        limit = f"a block of model.drafter has {most} drafts"
    else:
        return
    levels = num_drafted_levels(config.method, kind)
    if levels > most:
        raise ConfigError(f"method.tree: it drafts {levels} levels deep, and {limit}; take a shallower tree")


def _check_verifier(head: WeightsConfig, target: Any) -> None:
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
