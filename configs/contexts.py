"""Defines the options of drafter contexts, the prompts of the drafter's lanes, and of ensembles of several contexts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.section import Device, Place, Section


class FullContextConfig(Section):
    """The whole prompt, images included (M of TABED)."""

    kind: Literal["full"] = "full"


class TextOnlyContextConfig(Section):
    """The prompt with a newline in place of each image and each video (T of TABED)."""

    kind: Literal["text_only"] = "text_only"


class PooledContextConfig(Section):
    """The prompt with image features averaged 2 × 2 before the projector (P of TABED), for LLaVA-1.5, the Qwen vision
    families, and videos of LLaVA-OneVision."""

    kind: Literal["pooled"] = "pooled"


class CaptionContextConfig(Section):
    """The prompt with a caption in place of each image and each video (C of TABED); a small captioner describes the
    image or the video's middle frame."""

    kind: Literal["caption"] = "caption"
    path: Place
    """The captioner's folder or hub id."""
    revision: str | None = None
    """A commit, tag or branch of the hub."""
    prompt: str = "<CAPTION>"
    """The captioner's prompt, in the format of its processor."""
    lead: str = "image: "
    """Text before the caption."""
    num_beams: Annotated[int, Field(ge=1, le=16)] = 3
    """Number of beams of the captioner's beam search."""
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] = 128
    """Maximum number of tokens of a caption."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the captioner's weights, as `model.target.dtype`."""
    device: Device = "auto"
    """Device of the captioner, as `model.target.device`."""


class PrunedContextConfig(Section):
    """The prompt without most of its visual tokens (SpecVLM)."""

    kind: Literal["pruned"] = "pruned"
    ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Share of visual tokens that are removed."""
    guidance: Literal["uniform", "attention"] = "uniform"
    """Selection of kept tokens: at `uniform` spacing, or in two stages by the target's `attention`."""
    attention_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4
    """Share of the attention that the tokens of stage I cover."""
    positions: Literal["original", "compact"] = "original"
    """Rotary positions of kept tokens: `original`, or renumbered (`compact`)."""


class EnsembleConfig(Section):
    """Weights of the lanes of several contexts (TABED)."""

    policy: Literal["static", "random", "matches", "error", "inverse_softmax", "inverse_linear", "adaboost"] = "matches"
    """Rule for the lanes' weights. `matches` and `error` search a grid; `inverse_softmax` (paper) and `inverse_linear`
    (code) use 1/error."""
    distance: Literal["kl", "tvd"] = "kl"
    """Error of a lane at a position: `kl` or `tvd` to the target."""
    window: Annotated[int, Field(ge=0, le=4096)] = 0
    """Number of latest verified positions that determine the weights; 0 uses all."""
    steps: Annotated[int, Field(ge=1, le=100)] = 10
    """Grid weights are multiples of 1 / steps."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Temperature of the softmax over inverse errors."""
    adaboost_constant: Annotated[float, Field(ge=0.0)] = 1.0
    """Factor C of AdaBoost's constant term."""
    static_weights: tuple[Annotated[float, Field(ge=0.0)], ...] = ()
    """Weights of the lanes for `static`; equal if empty."""

    @model_validator(mode="after")
    def _some_weight(self) -> EnsembleConfig:
        if self.static_weights and sum(self.static_weights) <= 0:
            raise ValueError("static_weights must not all be 0")
        return self


ContextConfig = Annotated[
    FullContextConfig | TextOnlyContextConfig | PooledContextConfig | CaptionContextConfig | PrunedContextConfig,
    Field(discriminator="kind"),
]
