"""Drafters that are heads on the target (their checkpoint is `model.drafter`), and the one without a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.section import Section


class EagleDrafter(Section):
    """EAGLE-1/2: one decoder layer over the target's own features (`model.drafter` is the head's folder)."""

    kind: Literal["eagle"] = "eagle"


class MedusaDrafter(Section):
    """Medusa: one head per draft depth on the target's last state (`model.drafter` is the heads' folder)."""

    kind: Literal["medusa"] = "medusa"


class LookupDrafter(Section):
    """Prompt look-up: copy what followed the last few tokens when they stood in prompt or output before."""

    kind: Literal["lookup"] = "lookup"
    min_ngram_tokens: Annotated[int, Field(ge=1, le=64)] = 1
    max_ngram_tokens: Annotated[int, Field(ge=1, le=64)] = 3
    """Shortest and longest match; the longest found is used."""
    match: Literal["latest", "first"] = "latest"
    """Which of several longest matches is copied."""

    @model_validator(mode="after")
    def _bounds(self) -> LookupDrafter:
        if self.min_ngram_tokens > self.max_ngram_tokens:
            raise ValueError(
                f"min_ngram_tokens {self.min_ngram_tokens} is above max_ngram_tokens {self.max_ngram_tokens}"
            )
        return self
