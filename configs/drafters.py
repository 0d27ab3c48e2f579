"""Drafters, and the vocabulary that they draft from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.contexts import EnsembleChoice
from configs.section import Place, Section


class DraftVocabulary(Section):
    """The draft vocabulary; the drafter's output layer keeps the rows of these tokens. EOS tokens are always
    included."""

    path: Place | None = None
    """A list of the [draft vocabulary](../methods/vocabulary.md), most frequent token first; all tokens if neither
    is set."""
    size: Annotated[int, Field(ge=1)] | None = None
    """How many of the list; without a list the lowest ids."""

    @model_validator(mode="after")
    def _some(self) -> DraftVocabulary:
        if self.path is None and self.size is None:
            raise ValueError("give path, size or both")
        if self.path is not None and "://" in self.path:
            raise ValueError(f"path: {self.path} is a URL; the list has to be a file that every machine sees")
        return self


class NoDrafter(Section):
    """Plain decoding."""

    kind: Literal["none"] = "none"


class ModelDrafter(Section):
    """An independent smaller model, `model.drafter`; with several contexts, an ensemble of them (TABED)."""

    kind: Literal["model"] = "model"
    ensemble: EnsembleChoice | None = None
    """Weights of several contexts; the section's defaults if left out."""
    vocabulary: DraftVocabulary | None = None
    """Tokens that are drafted; all if left out."""


class EagleDrafter(Section):
    """An EAGLE-1/2 head: one decoder layer over the target's features; `model.drafter` is its folder."""

    kind: Literal["eagle"] = "eagle"
    vocabulary: DraftVocabulary | None = None
    """Tokens that are drafted; all if left out."""


class MedusaDrafter(Section):
    """Medusa heads: one per draft depth on the target's last state; `model.drafter` is their folder."""

    kind: Literal["medusa"] = "medusa"
    vocabulary: DraftVocabulary | None = None
    """Tokens that are drafted; all if left out."""


class LookupDrafter(Section):
    """Prompt lookup: copies the tokens that followed the last few tokens earlier in the prompt or output."""

    kind: Literal["lookup"] = "lookup"
    min_ngram_tokens: Annotated[int, Field(ge=1, le=64)] = 1
    """Shortest match."""
    max_ngram_tokens: Annotated[int, Field(ge=1, le=64)] = 3
    """Longest match; the longest found is used."""
    match: Literal["latest", "first"] = "latest"
    """Which of several longest matches is copied: `latest` or `first`."""

    @model_validator(mode="after")
    def _bounds(self) -> LookupDrafter:
        shortest, longest = self.min_ngram_tokens, self.max_ngram_tokens
        if shortest > longest:
            raise ValueError(f"min_ngram_tokens {shortest} is above max_ngram_tokens {longest}")
        return self


Drafter = Annotated[
    NoDrafter | ModelDrafter | EagleDrafter | MedusaDrafter | LookupDrafter, Field(discriminator="kind")
]
