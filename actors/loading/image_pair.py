"""Loads LlamaGen targets with their drafter, VQ model and text encoder, and checks that they fit each other.

`check` reads only sizes and headers, on the driver; `load` and `load_painter` read weights, each in its own actor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actors.loading import loaded_pair
from actors.loading.drafters import (
    Head,
    check_image_drafter,
    check_layers,
    is_head,
    load_gpt_target,
    load_head,
    load_text_encoder,
    read_at,
)
from actors.loading.loaded_pair import LoadedPair, compile_models
from actors.loading.method import check_neighbours
from actors.results import RowRefused
from configs.acceptance import LanternAcceptanceConfig
from configs.load import ConfigError
from configs.synthesis import SynthesizeJobConfig
from decoding.errors import PROMPT_REFUSED
from models.backends.select import resolve_device
from models.inputs.processing import PromptError
from models.llamagen.checkpoints import read_gpt_shape, revision_of
from models.llamagen.condition import EmptyPrompt, PromptTooLong, T5Condition, check_t5
from models.llamagen.shape import GptShape
from models.llamagen.target import LlamaGenTarget
from models.llamagen.vq import Vq
from models.llamagen.vq_files import load_vq, read_vq_shape
from models.loading.checkpoints import CheckpointRef, read_config
from models.loading.checkpoints import revision_of as revision_of_config

REFUSALS: dict[type[PromptError], str] = {EmptyPrompt: "empty_prompt", PromptTooLong: "prompt_too_long"}
"""Error codes of prompts that the text encoder refuses; all others are `prompt_refused`."""


@dataclass(frozen=True)
class ImagePairInfo(loaded_pair.PairInfo):
    """Metadata of an image pair; `image_px` is the side of an image in pixels, 0 if images are not decoded."""

    target: GptShape
    image_px: int


@dataclass(frozen=True)
class ImagePair(LoadedPair):
    """A loaded image pair; each slot has the KV positions of exactly one image."""

    config: SynthesizeJobConfig
    target: LlamaGenTarget
    drafter: LlamaGenTarget | Head | None
    info: ImagePairInfo
    text_encoder: T5Condition | None = None

    @property
    def num_image_tokens(self) -> int:
        """Number of codes of one image."""
        return self.info.target.num_image_tokens

    @property
    def max_context_tokens(self) -> int:
        return self.info.target.num_condition_tokens + self.info.target.num_image_tokens

    def encode(self, prompt: str) -> NDArray[np.float32]:
        """Encode a prompt to features (L, condition_dim); raise RowError if it is empty or too long."""
        assert self.text_encoder is not None, "the schema requires a text encoder unless rows contain conditions"
        try:
            with torch.inference_mode():
                return self.text_encoder.encode(prompt).float().cpu().numpy()
        except PromptError as error:
            code = next((code for kind, code in REFUSALS.items() if isinstance(error, kind)), PROMPT_REFUSED)
            raise RowRefused(code, str(error)) from None


class VqPainter:
    """A loaded VQ model that turns codes of square images into pixels."""

    def __init__(self, vq: Vq, grid: int, device: torch.device) -> None:
        self._vq = vq
        self._grid = grid
        self._device = device

    def paint(self, codes: NDArray[np.int32]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Decode codes (b, grid²) in raster order; return RGB pixels (b, H, W, 3) and which images are finite (b,)."""
        square = torch.from_numpy(np.ascontiguousarray(codes)).to(self._device).reshape(-1, self._grid, self._grid)
        with torch.inference_mode():
            pixels = self._vq.decode(square).float()
            finite = pixels.isfinite().flatten(1).all(dim=1)
            # Round to the nearest of 256 levels, like LlamaGen's public code.
            levels = (127.5 * pixels + 128.0).nan_to_num().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        return levels.cpu().numpy(), finite.cpu().numpy()


def check(config: SynthesizeJobConfig) -> ImagePairInfo:
    """Read the sizes of all checkpoints, without weights, and compare them.

    Raises:
        ConfigError: a checkpoint is missing or unreadable, or does not fit another one; names the dotted path.
    """
    model = config.model
    target = read_at("model.target", model.target, read_gpt_shape)
    refs = {"target": model.target}
    if model.condition is not None:
        refs["condition"] = model.condition
    _check_condition(config, target)
    interval, num_codes = config.sampling.guidance_interval, target.num_image_tokens
    if interval + 1 >= num_codes:
        raise ConfigError(
            f"sampling.guidance_interval: {interval} guides the codes 0 … {interval + 1}, and an image of the target "
            f"has {num_codes}; take -1 to guide all of them"
        )
    image_px = 0
    if model.vq is not None:
        vq = read_at("model.vq", model.vq, read_vq_shape)
        if vq.codebook_size != target.vocab_size:
            raise ConfigError(
                f"model.vq: {model.vq.path} has a codebook of {vq.codebook_size} codes, and the target draws from "
                f"{target.vocab_size}; take the VQ model that the target was trained with"
            )
        if isinstance(config.method.acceptance, LanternAcceptanceConfig):
            check_neighbours(config.method.acceptance, vq.codebook_size)
        image_px = target.grid * vq.factor
        refs["vq"] = model.vq
    check_layers(config.method, model.target.path, target.num_layers)
    if model.drafter is not None and config.method.needs_checkpoint:
        check_image_drafter(config, model.drafter, target)
        refs["drafter"] = model.drafter
    revisions = {
        # A text encoder is identified by its hub commit, so that its decoder need not be downloaded and hashed.
        name: read_at(f"model.{name}", weights, _text_revision if name == "condition" else revision_of)
        for name, weights in refs.items()
    }
    ids = {name: f"{refs[name].path}@{revisions[name]}" for name in ("target", "drafter") if name in refs}
    return ImagePairInfo(
        ids["target"], ids.get("drafter", ""), revisions, target, image_px if config.sink.images else 0
    )


def _check_condition(config: SynthesizeJobConfig, target: GptShape) -> None:
    path = config.model.target.path
    encoder, has_labels = config.model.condition, config.columns.label is not None
    if target.condition == "class" and not has_labels:
        raise ConfigError(
            f"columns.label: the target {path} draws one of {target.num_classes} classes, so the rows must name them"
        )
    if target.condition == "text" and has_labels:
        raise ConfigError(f"columns.label: the target {path} is text-conditional and has no classes")
    if target.condition == "class" and encoder is not None:
        raise ConfigError(f"model.condition: the target {path} is class-conditional and reads no text")
    if encoder is not None:
        read_at("model.condition", encoder, lambda ref: check_t5(ref, target))


def load(config: SynthesizeJobConfig) -> ImagePair:
    """Load the target, the drafter and the text encoder onto their devices; raise ConfigError as `check`."""
    info, model = check(config), config.model
    target = load_gpt_target("model.target", model.target, config.is_guided)
    drafter: LlamaGenTarget | Head | None = None
    if model.drafter is not None and info.drafter_id:
        if is_head(config):
            drafter = load_head(config, target)
        else:
            drafter = load_gpt_target("model.drafter", model.drafter, config.is_guided)
    text_encoder, codebook = None, None
    if model.condition is not None:
        text_encoder = load_text_encoder("model.condition", model.condition, info.target)
    if isinstance(config.method.acceptance, LanternAcceptanceConfig):
        assert model.vq is not None, "the schema requires model.vq for this acceptance"
        cpu = torch.device("cpu")
        codebook = read_at("model.vq", model.vq, lambda ref: load_vq(ref, "auto", cpu).codebook.clone())
    compile_models(config.pool, [network for network in (target, drafter) if isinstance(network, LlamaGenTarget)])
    return ImagePair(config, target, drafter, info, codebook, text_encoder)


def load_painter(config: SynthesizeJobConfig) -> VqPainter:
    """Load only the VQ model; raise ConfigError as `check`."""
    weights = config.model.vq
    assert weights is not None, "the schema requires model.vq to decode images"
    target = read_at("model.target", config.model.target, read_gpt_shape)
    device = resolve_device(weights.device)
    vq = read_at("model.vq", weights, lambda ref: load_vq(ref, weights.dtype, device, target.vocab_size))
    return VqPainter(vq, target.grid, device)


def _text_revision(ref: CheckpointRef) -> str:
    return revision_of_config(ref, read_config(ref))
