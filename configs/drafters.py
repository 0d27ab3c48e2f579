"""Defines the options of drafters, and of the draft vocabulary."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from configs.contexts import EnsembleConfig
from configs.section import BUILT_IN, EXTERNAL, ExternalDrafterConfig, Place, Section, kind_tag

MAX_LAYERS = 1000
"""Maximum number of layers of a target, for options that name layers."""


def check_ngrams(shortest: int, longest: int) -> None:
    """Raise ValueError if the shortest match is longer than the longest."""
    if shortest > longest:
        raise ValueError(f"min_ngram_tokens {shortest} is above max_ngram_tokens {longest}")


class DraftVocabularyConfig(Section):
    """The draft vocabulary: the drafter's output layer keeps only the rows of these tokens and of EOS tokens."""

    path: Place | None = None
    """A file that lists the tokens of the [draft vocabulary](../methods/vocabulary.md), most frequent token first; set
    `path`, `size` or both."""
    size: Annotated[int, Field(ge=1)] | None = None
    """Number of tokens: the first tokens of the list, or without a list the lowest ids."""

    @model_validator(mode="after")
    def _some(self) -> DraftVocabularyConfig:
        if self.path is None and self.size is None:
            raise ValueError("give path, size or both")
        if self.path is not None and "://" in self.path:
            raise ValueError(f"path: {self.path} is a URL; the list has to be a file that every machine sees")
        return self


class NoDrafterConfig(Section):
    """Plain decoding."""

    kind: Literal["none"] = "none"


class ModelDrafterConfig(Section):
    """An independent smaller model, `model.drafter`; with several contexts, an ensemble of their lanes (TABED)."""

    kind: Literal["model"] = "model"
    ensemble: EnsembleConfig | None = None
    """Weights of several contexts; defaults if left out."""
    vocabulary: DraftVocabularyConfig | None = None
    """Tokens that are drafted; all if left out."""


class EagleDrafterConfig(Section):
    """An EAGLE-1/2 head: one decoder layer over the target's features; `model.drafter` names its checkpoint."""

    kind: Literal["eagle"] = "eagle"
    vocabulary: DraftVocabularyConfig | None = None
    """Tokens that are drafted; all if left out."""


class Eagle3DrafterConfig(Section):
    """An EAGLE-3 head: decoder layers over the states of several target layers, with an own draft vocabulary;
    `model.drafter` names its checkpoint, in the format of speculators, SpecForge or EAGLE. A P-EAGLE head of
    speculators drafts all levels in one forward."""

    kind: Literal["eagle3"] = "eagle3"


class VispecDrafterConfig(Section):
    """A ViSpec head: EAGLE for vision-language models, with an adaptor that compresses each image; `model.drafter`
    names its checkpoint."""

    kind: Literal["vispec"] = "vispec"
    vocabulary: DraftVocabularyConfig | None = None
    """Tokens that are drafted; all if left out."""


class MsdDrafterConfig(Section):
    """An MSD head: EAGLE for vision-language models, whose inputs at visual tokens are the image embeddings;
    `model.drafter` names its checkpoint."""

    kind: Literal["msd"] = "msd"
    vocabulary: DraftVocabularyConfig | None = None
    """Tokens that are drafted; all if left out."""


class MedusaDrafterConfig(Section):
    """Medusa heads on the target's last state, one per draft depth; `model.drafter` names their checkpoint."""

    kind: Literal["medusa"] = "medusa"
    vocabulary: DraftVocabularyConfig | None = None
    """Tokens that are drafted; all if left out."""


class BlockDrafterConfig(Section):
    """A block drafter (DFlash): one forward drafts all levels from the states of several target layers; `model.drafter`
    names its checkpoint, in the format of DFlash or speculators."""

    kind: Literal["block"] = "block"


class MtpDrafterConfig(Section):
    """The multi-token-prediction (MTP) layer of the target's own checkpoint, over the target's last state; no
    `model.drafter`. Any number of drafts, by repeated use of the layer."""

    kind: Literal["mtp"] = "mtp"
    vocabulary: DraftVocabularyConfig | None = None
    """Tokens that are drafted; all if left out."""


class LayerSkipDrafterConfig(Section):
    """Self-speculation: some of the target's own layers, then its output layer; no checkpoint and no KV cache."""

    kind: Literal["layer_skip"] = "layer_skip"
    layers: (
        Annotated[int, Field(ge=1, le=MAX_LAYERS)]
        | Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_LAYERS)], ...], Field(min_length=1, max_length=MAX_LAYERS)]
    )
    """A number n: the target's first n layers (early exit). A list: the layers with these indices, from 0, in ascending
    order; the others are skipped. Fewer than the target has."""
    vocabulary: DraftVocabularyConfig | None = None
    """Tokens that are drafted; all if left out."""

    @model_validator(mode="after")
    def _ascending(self) -> LayerSkipDrafterConfig:
        indices = self.indices
        if any(index >= other for index, other in pairwise(indices)):
            raise ValueError(f"layers: {list(indices)} is not in ascending order, each layer once")
        return self

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the layers that the drafter runs, ascending."""
        return tuple(range(self.layers)) if isinstance(self.layers, int) else self.layers


class LookupDrafterConfig(Section):
    """Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens in prompt or output."""

    kind: Literal["lookup"] = "lookup"
    min_ngram_tokens: Annotated[int, Field(ge=1, le=64)] = 1
    """Shortest match, in tokens."""
    max_ngram_tokens: Annotated[int, Field(ge=1, le=64)] = 3
    """Longest match, in tokens; the longest match found is used."""
    match: Literal["latest", "first"] = "latest"
    """The match to copy if several are longest: `latest` or `first`."""

    @model_validator(mode="after")
    def _bounds(self) -> LookupDrafterConfig:
        check_ngrams(self.min_ngram_tokens, self.max_ngram_tokens)
        return self


class JacobiDrafterConfig(Section):
    """Speculative Jacobi decoding: drafts the target's own choices of the previous step. The tree must be a chain, and
    acceptance must be `exact`, `rejection`, `typical` or `lantern`."""

    kind: Literal["jacobi"] = "jacobi"
    fill: Literal["repeat", "above"] = "repeat"
    """Drafts of positions that no step has reached yet: the last known token (`repeat`), or for images the code one row
    up (`above`)."""


class SuffixDrafterConfig(Section):
    """Suffix decoding: drafts the usual continuation of the last tokens in the row's own text and in finished outputs
    of the same actor. The tree must be a chain, and acceptance must be `exact`."""

    kind: Literal["suffix"] = "suffix"
    min_ngram_tokens: Annotated[int, Field(ge=1, le=32)] = 1
    """Shortest match, in tokens."""
    max_ngram_tokens: Annotated[int, Field(ge=1, le=32)] = 8
    """Longest match, in tokens; the longest match found is used."""
    max_corpus_tokens: Annotated[int, Field(ge=256, le=1_048_576)] = 65_536
    """Maximum number of tokens of finished outputs that are searched; older outputs are dropped."""

    @model_validator(mode="after")
    def _bounds(self) -> SuffixDrafterConfig:
        check_ngrams(self.min_ngram_tokens, self.max_ngram_tokens)
        return self


class GrammarDrafterConfig(Section):
    """Drafts the tokens that `output` forces, without a model. The tree must be a chain; `method.forced_tokens` drafts
    them before another drafter's tokens."""

    kind: Literal["grammar"] = "grammar"


BuiltInDrafterConfig = Annotated[
    NoDrafterConfig
    | ModelDrafterConfig
    | EagleDrafterConfig
    | Eagle3DrafterConfig
    | VispecDrafterConfig
    | MsdDrafterConfig
    | MedusaDrafterConfig
    | BlockDrafterConfig
    | MtpDrafterConfig
    | LayerSkipDrafterConfig
    | LookupDrafterConfig
    | JacobiDrafterConfig
    | SuffixDrafterConfig
    | GrammarDrafterConfig,
    Field(discriminator="kind"),
]
DrafterConfig = Annotated[
    Annotated[BuiltInDrafterConfig, Tag(BUILT_IN)] | Annotated[ExternalDrafterConfig, Tag(EXTERNAL)],
    Discriminator(kind_tag),
]
