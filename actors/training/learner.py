"""Loads a target and the head to train for it, for one worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.loading.drafters import load_gpt_target, load_text_encoder, read_at
from actors.loading.generation import measured_options
from actors.loading.pair import load_target
from actors.loading.vocabulary import drafted_ids
from actors.training.samples import CodesOf, ImageSamples, TextSamples
from configs.load import ConfigError
from configs.schema import WeightsConfig
from configs.training import (
    BlockHeadConfig,
    Eagle3HeadConfig,
    LayerCutHeadConfig,
    MedusaHeadConfig,
    MtpHeadConfig,
    TrainDrafterJobConfig,
)
from models.backends.select import resolve_device
from models.contract import TargetModel
from models.heads.mtp_files import MtpMissing, check_mtp, save_with_mtp
from models.heads.training.block_loss import BlockTask, fresh_block
from models.heads.training.eagle3_loss import Eagle3Task, fresh_eagle3
from models.heads.training.layer_cut import LayerCutTask, cut_layers, save_model
from models.heads.training.losses import EagleTask, HeadTask, MedusaTask, fresh_eagle, fresh_medusa
from models.heads.training.mtp_loss import MtpTask, fresh_mtp
from models.heads.writer import save_block, save_eagle, save_eagle3, save_medusa
from models.llamagen import checkpoints as gpt_files
from models.llamagen.condition import check_t5
from models.llamagen.eagle import image_eagle, image_eagle_shape, image_fields, pair_rotary, save_image_eagle
from models.llamagen.shape import GptShape
from models.llamagen.target import LlamaGenTarget
from models.llamagen.vq import square_pixels
from models.llamagen.vq_files import load_vq, read_vq_shape
from models.loading import checkpoints
from models.loading.checkpoints import CheckpointError, CheckpointRef
from models.target import Target

NUM_SPECULATIVE_TOKENS = 5
"""Draft tokens per step that an exported EAGLE-3 head proposes to other engines."""


@dataclass(frozen=True)
class Learner:
    """Target, head and training samples of one worker; `shape` is the shape of an image target, None for text, and
    `checkpoint` is where a text target was loaded from.
    `processors` are the options of `decoding.Sampling` by which the target's generation settings change its logits."""

    target: TargetModel
    task: HeadTask
    training_samples: TextSamples | ImageSamples
    shape: GptShape | None = None
    processors: dict[str, Any] = field(default_factory=dict)
    checkpoint: CheckpointRef | None = None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens as text, which columns must not contain; empty for image targets."""
        return self.target.front_end.special_tokens if isinstance(self.target, Target) else ()

    def round(self, dtype: torch.dtype) -> None:
        """Round the head's weights to `dtype` in place; their own type does not change."""
        with torch.no_grad():
            for parameter in self.task.module.parameters():
                parameter.copy_(parameter.to(dtype))

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the head to `folder`, in the file layout of public checkpoints; an MTP layer with the target."""
        if isinstance(self.task, MtpTask):
            assert self.checkpoint is not None, "an MTP layer is trained for a checkpoint of transformers"
            _save_mtp(self.task, self.target, self.checkpoint, folder, dtype)
            return
        save_head(self.task, self.target, folder, dtype, self.target.name)


def save_head(
    task: HeadTask, target: TargetModel, folder: Path, dtype: torch.dtype, name: str, own_embedding: bool = True
) -> None:
    """Write a head for `target`, which its file calls `name`, in the file layout of public checkpoints.

    Without `own_embedding`, an EAGLE-3 head is written without the token embedding, which is the target's.
    """
    architectures = (type(target.model).__name__,) if isinstance(target, Target) else ()
    if isinstance(task, MedusaTask):
        save_medusa(task.heads, folder, dtype)
    elif isinstance(task, Eagle3Task):
        extra = image_fields(target.gpt.shape) if isinstance(target, LlamaGenTarget) else {}
        save_eagle3(task.network, folder, name, architectures, NUM_SPECULATIVE_TOKENS, dtype, extra, own_embedding)
    elif isinstance(task, BlockTask):
        save_block(task.network, folder, name, architectures, dtype)
    elif isinstance(task, LayerCutTask):
        assert isinstance(target, Target)
        save_model(task.module, target.front_end.processor, folder, dtype)
    else:
        assert isinstance(task, EagleTask)
        if isinstance(target, LlamaGenTarget):
            save_image_eagle(task.network, target.gpt.shape, folder, dtype)
        else:
            save_eagle(task.network, folder, dtype)


def check_target(job: TrainDrafterJobConfig) -> str:
    """Return the target's revision; raise ConfigError if a checkpoint is unreadable or does not fit the target."""
    if job.image is None:
        config = read_at("target", job.target, checkpoints.read_config)
        if isinstance(job.head, LayerCutHeadConfig):
            if getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None):
                raise ConfigError(
                    f"head.kind: layer_cut cannot cut {job.target.path}, whose first layers receive visual features"
                )
            _layers(job.head, config.get_text_config().num_hidden_layers)
        if isinstance(job.head, MtpHeadConfig):
            num_layers = config.get_text_config().num_hidden_layers
            read_at("target", job.target, lambda ref: _check_has_no_mtp(ref, num_layers))
        _processors(job, config.get_text_config().vocab_size)
        return read_at("target", job.target, lambda ref: checkpoints.revision_of(ref, config))
    shape = read_at("target", job.target, gpt_files.read_gpt_shape)
    revision = read_at("target", job.target, gpt_files.revision_of)
    is_class = job.image.columns.label is not None
    if is_class != (shape.condition == "class"):
        needed = "image.columns.label" if shape.condition == "class" else "a prompt or image.columns.features"
        raise ConfigError(f"target: {job.target.path} is {shape.condition}-conditional, so it is trained with {needed}")
    if job.image.condition is not None:
        read_at("image.condition", job.image.condition, lambda ref: check_t5(ref, shape))
    if job.image.vq is not None:
        codebook_size = read_at("image.vq", job.image.vq, read_vq_shape).codebook_size
        if codebook_size != shape.vocab_size:
            raise ConfigError(f"image.vq: it has {codebook_size} codes, and the target draws from {shape.vocab_size}")
    return revision


def _processors(job: TrainDrafterJobConfig, vocab_size: int) -> dict[str, Any]:
    """Return `Learner.processors`; none if acceptance is not measured."""
    return measured_options("target", job.target, vocab_size) if job.acceptance.num_rows else {}


def load_learner(job: TrainDrafterJobConfig) -> Learner:
    """Load the target, a new head, and the mapping of rows to training samples; raise ConfigError as `check_target`."""
    image = job.image
    if image is None:
        target = load_target(job.target, "target")
        processors = _processors(job, target.vocab_size)
        checkpoint = read_at("target", job.target, lambda ref: ref)
        samples = TextSamples(target, job)
        return Learner(target, fresh_head(job, target), samples, processors=processors, checkpoint=checkpoint)
    gpt = load_gpt_target("target", job.target, guided=True).gpt
    encoder = None if image.condition is None else load_text_encoder("image.condition", image.condition, gpt.shape)
    image_target = LlamaGenTarget(gpt, encoder, guided=True, name=job.target.path)
    codes_of = None if image.vq is None else _codes_of(image.vq, gpt.shape.grid)
    image_samples = ImageSamples(image_target, job, codes_of)
    return Learner(image_target, fresh_head(job, image_target), image_samples, gpt.shape)


def fresh_head(job: TrainDrafterJobConfig, target: TargetModel) -> HeadTask:
    """Create the configured head for the target, untrained."""
    seed = job.training.seed
    if isinstance(job.head, MedusaHeadConfig):
        return fresh_medusa(target, seed, job.head.num_heads)
    if isinstance(job.head, LayerCutHeadConfig):
        assert isinstance(target, Target)
        layers = _layers(job.head, target.decoder.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
        return cut_layers(target, layers, job.head.freeze_embeddings)
    if isinstance(job.head, BlockHeadConfig):
        assert isinstance(target, Target)
        return _fresh_block(job.head, target, seed)
    if isinstance(job.head, MtpHeadConfig):
        assert isinstance(target, Target)
        text, num_steps = target, job.head.num_draft_steps
        return read_at("target", job.target, lambda _: fresh_mtp(text, seed, num_steps))
    if isinstance(job.head, Eagle3HeadConfig):
        return _fresh_eagle3(job.head, target, seed)
    if isinstance(target, LlamaGenTarget):
        shape = target.gpt.shape
        return fresh_eagle(target, seed, lambda: image_eagle(image_eagle_shape(shape), shape))
    return fresh_eagle(target, seed)


def _check_has_no_mtp(ref: CheckpointRef, num_layers: int) -> None:
    """Raise CheckpointError if a checkpoint has an MTP layer."""
    try:
        layout = check_mtp(ref, num_layers)
    except MtpMissing:
        return
    if layout is not None:
        raise CheckpointError(f"{ref.path}: it has an MTP layer already, at {layout.prefix}*; use it with method mtp")


def _save_mtp(
    task: MtpTask, target: TargetModel, checkpoint: CheckpointRef, folder: Path, dtype: torch.dtype
) -> None:
    parameters = {name: value.to(dtype) for name, value in task.network.named_parameters()}
    config: Any = target.decoder.config
    tensors = task.network.state_dict() | parameters
    save_with_mtp(checkpoint, tensors, config.model_type, config.num_hidden_layers, folder)


def _layers(head: LayerCutHeadConfig, num_layers: int) -> tuple[int, ...]:
    try:
        return head.indices(num_layers)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _fresh_block(head: BlockHeadConfig, target: Target, seed: int) -> HeadTask:
    mask = _mask_token_id(target) if head.mask_token_id is None else head.mask_token_id
    if mask is None:
        raise ConfigError("head.mask_token_id: no special token of the tokenizer can be the mask; give a token's id")
    if problem := _unfit_mask(mask, target):
        raise ConfigError(f"head.mask_token_id: {mask} {problem}")
    _check_feature_layers(head.feature_layers, target)
    return fresh_block(target, seed, mask, head.block_size, head.num_layers, head.feature_layers)


def _mask_token_id(target: Target) -> int | None:
    """Return the first fitting one of the tokenizer's mask, padding, unknown and first token."""
    tokenizer = target.front_end.tokenizer
    named = (getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "pad", "unk", "bos"))
    return next((token for token in named if token is not None and not _unfit_mask(token, target)), None)


def _unfit_mask(token_id: int, target: Target) -> str | None:
    """Return why a token cannot represent masks, None if it can."""
    embedding: Tensor = target.decoder.get_input_embeddings().weight  # type: ignore[operator]
    if token_id in target.eos_ids:
        return "ends answers"
    if token_id >= len(embedding):
        return f"is outside the {len(embedding)} tokens of the target"
    # Attention of a mask without an embedding is uniform, so the drafter learns no positions.
    return None if embedding[token_id].any() else "has an embedding of zeros, with which a drafter learns nothing"


def _check_feature_layers(layers: tuple[int, ...] | None, target: TargetModel) -> None:
    num_layers: int = target.decoder.config.num_hidden_layers  # type: ignore[union-attr, assignment]
    if outside := [layer for layer in layers or () if layer >= num_layers]:
        raise ConfigError(f"head.feature_layers: {outside[0]} is no state below a layer; the target has {num_layers}")


def _fresh_eagle3(head: Eagle3HeadConfig, target: TargetModel, seed: int) -> HeadTask:
    _check_feature_layers(head.feature_layers, target)
    ids = None if head.vocabulary is None else drafted_ids(head.vocabulary, target, target.vocab_size)
    rotary = pair_rotary(target.gpt.shape, target.gpt.shape.head_dim) if isinstance(target, LlamaGenTarget) else None
    return fresh_eagle3(target, seed, head.num_draft_steps, ids, head.feature_layers, rotary)


def _codes_of(weights: WeightsConfig, grid: int) -> CodesOf:
    vq = read_at("image.vq", weights, lambda ref: load_vq(ref, weights.dtype, resolve_device(weights.device)))

    def codes_of(image: NDArray[np.uint8]) -> NDArray[np.int64]:
        pixels = square_pixels(image, grid * vq.shape.factor)
        codes: NDArray[np.int64] = vq.encode(pixels[None].to(vq.codebook.device)).flatten().cpu().numpy()
        return codes

    return codes_of
