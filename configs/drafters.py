"""Drafters that are heads on the target (their checkpoint is `model.drafter`), and the one without a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

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


class EagleDrafter(Section):
    """EAGLE-1/2: one decoder layer over the target's own features (`model.drafter` is the head's folder)."""

    kind: Literal["eagle"] = "eagle"
    """An EAGLE-1/2 head on the target."""
    vocabulary: DraftVocabulary | None = None
    """Tokens that are drafted; all when left out."""


class MedusaDrafter(Section):
    """Medusa: one head per draft depth on the target's last state (`model.drafter` is the heads' folder)."""

    kind: Literal["medusa"] = "medusa"
    """Medusa heads on the target."""
    vocabulary: DraftVocabulary | None = None
    """Tokens that are drafted; all when left out."""


class LookupDrafter(Section):
    """Prompt lookup: copies the tokens that followed the last few tokens earlier in the prompt or output."""

    kind: Literal["lookup"] = "lookup"
    """Copies the tokens that followed the last few tokens earlier in the prompt or output."""
    min_ngram_tokens: Annotated[int, Field(ge=1, le=64)] = 1
    """Shortest match."""
    max_ngram_tokens: Annotated[int, Field(ge=1, le=64)] = 3
    """Longest match; the longest found is used."""
    match: Literal["latest", "first"] = "latest"
    """Which of several longest matches is copied: `latest` or `first`."""

    @model_validator(mode="after")
    def _bounds(self) -> LookupDrafter:
        if self.min_ngram_tokens > self.max_ngram_tokens:
            raise ValueError(
                f"min_ngram_tokens {self.min_ngram_tokens} is above max_ngram_tokens {self.max_ngram_tokens}"
            )
        return self
