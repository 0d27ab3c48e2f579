"""Contexts: the part of a sample that a drafter lane gets, and the weights of several lanes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.section import Device, Place, Section


class FullContext(Section):
    """The whole prompt, images included (M of TABED)."""

    kind: Literal["full"] = "full"


class TextOnlyContext(Section):
    """Each image, and each video, is one newline (T of TABED)."""

    kind: Literal["text_only"] = "text_only"


class PooledContext(Section):
    """Image features averaged 2 × 2 before the projector (P of TABED); LLaVA-1.5, the Qwen vision families, videos of
    LLaVA-OneVision."""

    kind: Literal["pooled"] = "pooled"


class CaptionContext(Section):
    """A caption of each image, and of the middle frame of each video, by a small captioner (C of TABED)."""

    kind: Literal["caption"] = "caption"
    path: Place
    """The captioner's folder or hub id."""
    revision: str | None = None
    """The hub commit, tag or branch."""
    prompt: str = "<CAPTION>"
    """Its prompt, as its processor expects it."""
    lead: str = "image: "
    """Words before the caption."""
    num_beams: Annotated[int, Field(ge=1, le=16)] = 3
    """Beams of its search."""
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] = 128
    """Longest caption."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """As for the target."""
    device: Device = "auto"
    """As for the target."""


class PrunedContext(Section):
    """The prompt without most of its visual tokens (SpecVLM)."""

    kind: Literal["pruned"] = "pruned"
    ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Share of visual tokens that are removed."""
    guidance: Literal["uniform", "attention"] = "uniform"
    """`uniform` spacing, or two stages by the target's `attention`."""
    attention_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4
    """Share of the attention that stage I keeps."""
    positions: Literal["original", "compact"] = "original"
    """Kept tokens have their `original` rotary positions, or are renumbered (`compact`)."""


class EnsembleChoice(Section):
    """How the lanes of several contexts are weighed (TABED)."""

    policy: Literal["static", "random", "matches", "error", "inverse_softmax", "inverse_linear", "adaboost"] = "matches"
    """How lanes are weighed. `matches` and `error` search a grid; `inverse_softmax` (paper) and `inverse_linear` (code)
    weigh by 1/error."""
    distance: Literal["kl", "tvd"] = "kl"
    """Error at a position: `kl` or `tvd`."""
    window: Annotated[int, Field(ge=0, le=4096)] = 0
    """Latest judged positions that count; 0 is all."""
    steps: Annotated[int, Field(ge=1, le=100)] = 10
    """Grid weights are multiples of 1 / steps."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Of the softmax over inverse errors."""
    adaboost_constant: Annotated[float, Field(ge=0.0)] = 1.0
    """The factor C of the constant term."""
    static_weights: tuple[Annotated[float, Field(ge=0.0)], ...] = ()
    """Shares of the lanes; equal when empty."""

    @model_validator(mode="after")
    def _some_weight(self) -> EnsembleChoice:
        if self.static_weights and sum(self.static_weights) <= 0:
            raise ValueError("static_weights must not all be 0")
        return self


Context = Annotated[
    FullContext | TextOnlyContext | PooledContext | CaptionContext | PrunedContext, Field(discriminator="kind")
]
