"""What a drafter lane may see of a sample, and how several lanes are weighed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.section import Device, Place, Section


class FullContext(Section):
    """The whole prompt, images included (context M of TABED)."""

    kind: Literal["full"] = "full"


class TextOnlyContext(Section):
    """Each image is one newline (context T of TABED)."""

    kind: Literal["text_only"] = "text_only"


class PooledContext(Section):
    """Image features averaged 2×2 before the projector (context P of TABED); drafters of the LLaVA-1.5 kind."""

    kind: Literal["pooled"] = "pooled"


class CaptionContext(Section):
    """Each image told by a small captioner (context C of TABED)."""

    kind: Literal["caption"] = "caption"
    path: Place
    """The captioner's folder or hub id: any transformers image-text-to-text model."""
    revision: str | None = None
    prompt: str = "<CAPTION>"
    """What the captioner is asked; written as its processor expects it, image placeholder included."""
    lead: str = "image: "
    num_beams: Annotated[int, Field(ge=1, le=16)] = 3
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] = 128
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Device = "auto"


class PrunedContext(Section):
    """The prompt with a share of its visual columns taken out (SpecVLM)."""

    kind: Literal["pruned"] = "pruned"
    ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Share of visual columns taken out."""
    guidance: Literal["uniform", "attention"] = "uniform"
    """`attention`: two stages by the target's attention, which must have as many visual columns as the drafter."""
    attention_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4
    """Stage I keeps the smallest set of columns that holds this share of the attention."""
    positions: Literal["original", "compact"] = "original"
    """Rotary positions of what is kept: as in the whole prompt, or renumbered as the papers' code does."""


class EnsembleChoice(Section):
    """How the lanes of several contexts are weighed (TABED)."""

    policy: Literal["static", "random", "matches", "error", "inverse_softmax", "inverse_linear", "adaboost"] = "matches"
    """`matches` and `error` search a grid; `inverse_*` weigh by 1/error as paper (softmax) or code (linear) has it."""
    distance: Literal["kl", "tvd"] = "kl"
    window: Annotated[int, Field(ge=0, le=4096)] = 0
    """Latest judged positions that count; 0 is all of them."""
    steps: Annotated[int, Field(ge=1, le=100)] = 10
    """Grid weights are multiples of 1 / steps."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    adaboost_constant: Annotated[float, Field(ge=0.0)] = 1.0
    static_weights: tuple[Annotated[float, Field(ge=0.0)], ...] = ()
    """Shares of the lanes for `static`, and of every policy's first block; equal when empty."""

    @model_validator(mode="after")
    def _some_weight(self) -> EnsembleChoice:
        if self.static_weights and sum(self.static_weights) <= 0:
            raise ValueError("static_weights must not all be 0")
        return self
