"""Loads image pairs: LlamaGen, its drafter, its VQ model and text encoder, checked against each other.

`check` reads sizes and headers and runs on the driver before anything starts; `load` and `load_painter` read weights,
each in its own actor. `actors.loading.pair` loads text pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.loading.compiling import compile_models
from actors.loading.image_drafters import (
    ImageDrafter,
    check_drafter,
    load_drafter,
    load_gpt_target,
    load_text_encoder,
    place_of,
    read_at,
)
from actors.loading.method import build_method, plain_method
from actors.loading.slot_count import count_slots
from actors.synthesize import ConditionError
from configs.acceptance import LanternAcceptance
from configs.load import ConfigError
from configs.method import Method as MethodChoice
from configs.synthesis import SynthesizeJob
from decoding import Engine
from decoding.contracts import Method
from decoding.drafters.guarded import guarded
from decoding.errors import PROMPT_REFUSED
from models.inputs.processing import PromptError
from models.llamagen.checkpoints import read_gpt_shape, revision_of
from models.llamagen.condition import EmptyPrompt, PromptTooLong, T5Condition, check_t5
from models.llamagen.neighbours import CodebookError
from models.llamagen.shape import GptShape, VqShape
from models.llamagen.target import LlamaGenTarget
from models.llamagen.vq import Vq
from models.llamagen.vq_files import load_vq, read_vq_shape
from models.loading.checkpoints import CheckpointRef, read_config
from models.loading.checkpoints import revision_of as revision_of_config

REFUSALS: dict[type[PromptError], str] = {EmptyPrompt: "empty_prompt", PromptTooLong: "prompt_too_long"}
"""What the text encoder refuses, under stable codes; everything else is `prompt_refused`."""


@dataclass(frozen=True)
class ImagePairInfo:
    """What is known of an image pair without its weights; `image_px` is an image's side, 0 where none is decoded."""

    target: GptShape
    image_px: int
    target_id: str
    drafter_id: str
    revisions: dict[str, str]


@dataclass(frozen=True)
class ImagePair:
    """A loaded pair; `codebook` (V, code_dim) is there where the acceptance asks which codes are alike."""

    config: SynthesizeJob
    target: LlamaGenTarget
    drafter: ImageDrafter | None
    text_encoder: T5Condition | None
    codebook: Tensor | None
    info: ImagePairInfo

    @property
    def target_id(self) -> str:
        return self.info.target_id

    @property
    def drafter_id(self) -> str:
        return self.info.drafter_id

    @property
    def num_image_tokens(self) -> int:
        """Codes of one image."""
        return self.info.target.num_image_tokens

    def encode(self, prompt: str) -> NDArray[np.float32]:
        """A prompt's features (L, condition_dim).

        Raises:
            ConditionError: it is empty or too long.
        """
        assert self.text_encoder is not None, "the schema asks for a text encoder where no condition comes with rows"
        try:
            with torch.inference_mode():
                return self.text_encoder.encode(prompt).float().cpu().numpy()
        except PromptError as error:
            code = next((code for kind, code in REFUSALS.items() if isinstance(error, kind)), PROMPT_REFUSED)
            raise ConditionError(code, str(error)) from None

    def engine(self, slots: int, choice: MethodChoice | None = None) -> Engine:
        """A fresh engine over this pair, with room for exactly one image in each slot and the configured method; or,
        of several that the configuration names, with this one.

        Raises:
            ConfigError: the codebook has no neighbours to look up.
        """
        try:
            method = guarded(build_method(choice or self.config.method, self.drafter, self.target, self.codebook))
        except CodebookError as error:
            raise ConfigError(f"model.vq: {error}") from None
        return self._engine(method, slots)

    def count_slots(self) -> tuple[int, str]:
        """How many images there is memory for at once, whichever of the job's methods draws; and why, in words."""
        config = self.config
        return count_slots(config.pool, config.method.methods, self.target, self.drafter, self._num_tokens)

    def plain_engine(self) -> Engine:
        """A fresh engine of one slot, for rows on which the drafter failed."""
        return self._engine(plain_method(), 1)

    @property
    def _num_tokens(self) -> int:
        """Columns of one image with its condition."""
        return self.info.target.num_condition_tokens + self.info.target.num_image_tokens

    def _engine(self, method: Method, slots: int) -> Engine:
        pool = self.config.pool
        return Engine(self.target, method, slots, self._num_tokens, pool.max_row_s, pool.max_prefill_tokens)


class VqPainter:
    """A loaded VQ model that turns codes of square images into pixels."""

    def __init__(self, vq: Vq, grid: int, device: torch.device) -> None:
        self._vq = vq
        self._grid = grid
        self._device = device

    def paint(self, codes: NDArray[np.int32]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Codes (b, grid²) in raster order → RGB pixels (b, H, W, 3), and which images have finite ones (b,)."""
        square = torch.from_numpy(np.ascontiguousarray(codes)).to(self._device).reshape(-1, self._grid, self._grid)
        with torch.inference_mode():
            pixels = self._vq.decode(square).float()
            finite = pixels.isfinite().flatten(1).all(dim=1)
            # To the nearest of 256 levels, as the public code writes its samples.
            levels = (127.5 * pixels + 128.0).nan_to_num().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        return levels.cpu().numpy(), finite.cpu().numpy()


# --- checking ------------------------------------------------------------------------------------------------------


def check(config: SynthesizeJob) -> ImagePairInfo:
    """Look at every checkpoint's sizes, without reading weights, and compare them with each other.

    Raises:
        ConfigError: one is missing, unreadable or made for another; names the dotted path.
    """
    model = config.model
    target = read_at("model.target", model.target, read_gpt_shape)
    refs = {"target": model.target}
    _check_condition(config, target)
    _check_interval(config.sampling.guidance_interval, target.num_image_tokens)
    if model.condition is not None:
        refs["condition"] = model.condition
    image_px = 0
    if model.vq is not None:
        vq = read_at("model.vq", model.vq, read_vq_shape)
        _check_codebook(config, model.vq.path, vq, target)
        image_px = target.grid * vq.factor
        refs["vq"] = model.vq
    if model.drafter is not None and config.method.needs_checkpoint:
        check_drafter(config, model.drafter, target)
        refs["drafter"] = model.drafter
    revisions = {
        # A text encoder is identified by its hub commit, so that its decoder need not be downloaded and hashed.
        name: read_at(f"model.{name}", weights, _text_revision if name == "condition" else revision_of)
        for name, weights in refs.items()
    }
    drafter_id = f"{refs['drafter'].path}@{revisions['drafter']}" if "drafter" in refs else ""
    target_id = f"{model.target.path}@{revisions['target']}"
    return ImagePairInfo(target, image_px if config.sink.images else 0, target_id, drafter_id, revisions)


def _check_condition(config: SynthesizeJob, target: GptShape) -> None:
    path = config.model.target.path
    if target.condition == "class" and config.columns.label is None:
        raise ConfigError(
            f"columns.label: the target {path} draws one of {target.num_classes} classes, so the rows must name them"
        )
    if target.condition == "text" and config.columns.label is not None:
        raise ConfigError(f"columns.label: the target {path} draws what a text says, and knows no classes")
    if target.condition == "class" and config.model.condition is not None:
        raise ConfigError(f"model.condition: the target {path} draws classes, and reads no text")
    if config.model.condition is not None:
        read_at("model.condition", config.model.condition, lambda ref: check_t5(ref, target))


def _check_interval(interval: int, num_codes: int) -> None:
    if interval + 1 >= num_codes:
        raise ConfigError(
            f"sampling.guidance_interval: {interval} guides the codes 0 … {interval + 1}, and an image of the target "
            f"has {num_codes}; take -1 to guide all of them"
        )


def _check_codebook(config: SynthesizeJob, path: str, vq: VqShape, target: GptShape) -> None:
    if vq.codebook_size != target.vocab_size:
        raise ConfigError(
            f"model.vq: {path} has a codebook of {vq.codebook_size} codes, and the target draws from "
            f"{target.vocab_size}; take the VQ model that the target was trained with"
        )
    rule = config.method.acceptance
    if isinstance(rule, LanternAcceptance):
        num_others = rule.k - 1 if rule.k_counts_draft else rule.k
        if num_others > vq.codebook_size - 1:
            raise ConfigError(
                f"method.acceptance.k: {rule.k} asks for {num_others} neighbours of a code, and a codebook of "
                f"{vq.codebook_size} codes has {vq.codebook_size - 1}; take a smaller k"
            )


# --- loading -------------------------------------------------------------------------------------------------------


def load(config: SynthesizeJob, torch_threads: int | None = None) -> ImagePair:
    """Load all that the engine's actor needs onto its devices.

    Raises:
        ConfigError: as `check`, and where weights are torn.
    """
    if torch_threads is not None:
        torch.set_num_threads(torch_threads)
    info = check(config)
    model = config.model
    target = load_gpt_target("model.target", model.target, config.is_guided)
    drafter = load_drafter(config, model.drafter, target) if model.drafter is not None and info.drafter_id else None
    text_encoder, codebook = None, None
    if model.condition is not None:
        text_encoder = load_text_encoder("model.condition", model.condition, info.target)
    if isinstance(config.method.acceptance, LanternAcceptance):
        assert model.vq is not None, "the schema asks for model.vq where the acceptance needs a codebook"
        cpu = torch.device("cpu")
        codebook = read_at("model.vq", model.vq, lambda ref: load_vq(ref, "auto", cpu).codebook.clone())
    compile_models(config.pool, [one for one in (target, drafter) if isinstance(one, LlamaGenTarget)])
    return ImagePair(config, target, drafter, text_encoder, codebook, info)


def load_painter(config: SynthesizeJob, torch_threads: int | None = None) -> VqPainter:
    """Load the VQ model alone.

    Raises:
        ConfigError: it is missing, torn, or has another codebook than the target.
    """
    if torch_threads is not None:
        torch.set_num_threads(torch_threads)
    weights = config.model.vq
    assert weights is not None, "the schema asks for model.vq where images are decoded"
    target = read_at("model.target", config.model.target, read_gpt_shape)
    place = place_of(weights)
    vq = read_at("model.vq", weights, lambda ref: load_vq(ref, weights.dtype, place, target.vocab_size))
    return VqPainter(vq, target.grid, place)


def _text_revision(ref: CheckpointRef) -> str:
    return revision_of_config(ref, read_config(ref))
