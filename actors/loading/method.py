"""Builds the parts of a method from its configuration.

Each dictionary maps a `kind` to a constructor, whose parameters (except for drafters) have the names of the section's
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from actors.loading.external import external_part
from actors.loading.vocabulary import slice_head, slice_medusa, slice_model
from configs.acceptance import LanternAcceptanceConfig
from configs.contexts import EnsembleConfig
from configs.load import ConfigError
from configs.method import MeasuredControllerConfig, MethodConfig, NoControllerConfig
from configs.section import ExternalPartConfig, Section
from decoding.acceptance import Exact, Fly, Lantern, LanternResidual, LVSpec, RandomRelaxation, Rejection, Typical
from decoding.contexts import Caption, Full, Pooled, Pruned, TextOnly, Unconditional
from decoding.contracts import Acceptance, Context, Drafter, Method, TreePolicy
from decoding.controllers.base import Controller
from decoding.controllers.goodput import GoodputController
from decoding.drafters import (
    BlockDrafter,
    EagleDrafter,
    GrammarDrafter,
    JacobiDrafter,
    LayerSkipDrafter,
    LookupDrafter,
    MedusaDrafter,
    ModelDrafter,
    MtpDrafter,
    NoDrafter,
    ParallelEagleDrafter,
    SuffixDrafter,
)
from decoding.drafters.ensemble import Ensemble, EnsembleOptions
from decoding.drafters.merge import Guided, Merge, SingleLane
from decoding.drafters.suffix_index import Corpus
from decoding.trees import Chain, DynamicTree, OnlineSageTree, SageSettings, SageTree, StaticTree, branching_paths
from decoding.trees.static import NAMED_PATHS, SPECVLM_PATHS
from models.captioner import Captioner
from models.contract import TargetModel
from models.heads.block import BlockNetwork
from models.heads.eagle import EagleNetwork, FeatureStack
from models.heads.eagle3 import Eagle3Network
from models.heads.medusa import MedusaHeads
from models.heads.mtp import MtpNetwork
from models.llamagen.neighbours import MAX_NEIGHBOURS, CodebookError, Proximity, nearest_codes
from models.loading.checkpoints import CheckpointRef

DrafterModel = TargetModel | EagleNetwork | Eagle3Network | MedusaHeads | BlockNetwork


def _static(name: str | None, branching: tuple[int, ...], paths: tuple[tuple[int, ...], ...]) -> StaticTree:
    return StaticTree(NAMED_PATHS[name] if name is not None else paths or branching_paths(branching))


def _sage(growth: str, first_paths: tuple[tuple[int, ...], ...], **settings: Any) -> TreePolicy:
    if growth == "online":
        return OnlineSageTree(SageSettings(**settings))
    return SageTree(SageSettings(**settings), first_paths or SPECVLM_PATHS)


def _caption(path: str, revision: str | None, lead: str, **options: Any) -> Caption:
    return Caption(Captioner.load(CheckpointRef(path, revision), **options), lead)


CONTEXTS: dict[str, Callable[..., Context]] = {
    "full": Full,
    "text_only": TextOnly,
    "pooled": Pooled,
    "pruned": Pruned,
    "caption": _caption,
}
TREES: dict[str, Callable[..., TreePolicy]] = {
    "chain": Chain,
    "static": _static,
    "dynamic": DynamicTree,
    "sage": _sage,
}
ACCEPTANCES: dict[str, Callable[..., Acceptance]] = {
    "exact": Exact,
    "rejection": Rejection,
    "lvspec": LVSpec,
    "fly": Fly,
    "random": RandomRelaxation,
    "typical": Typical,
}


def build_method(
    config: MethodConfig,
    drafter_model: DrafterModel | None,
    target: TargetModel,
    codebook: Tensor | None = None,
    corpora: dict[int, Corpus] | None = None,
) -> Method:
    """Build a method for one engine over `target`. Its parts hold state per slot, so each engine needs its own.

    Corpora of the drafter `suffix` are taken from `corpora`, by size, and added to it; None begins with an empty one.

    Raises:
        CodebookError: the codebook does not belong to the target, or is too small for the rule.
        ConfigError: the drafter has no token of the draft vocabulary, or its output layer cannot be sliced.
    """
    if isinstance(config.acceptance, LanternAcceptanceConfig):
        assert codebook is not None, "the schema requires a codebook for the acceptance 'lantern'"
        rule: Acceptance = build_lantern(config.acceptance, codebook, target.vocab_size)
    else:
        rule = _build(ACCEPTANCES, config.acceptance, "acceptance")
    tree = build_tree(config)
    controller = make_controller(config.controller, tree)
    site = _Site(config.drafter, config.contexts, drafter_model, target, {} if corpora is None else corpora)
    drafter = DRAFTERS.get(config.drafter.kind, _external)(site)
    if config.forced_tokens:
        drafter = GrammarDrafter(drafter)  # type: ignore[assignment]
    return Method(drafter, tree, rule, controller)


def plain_method() -> Method:
    """Build the method of plain decoding, without a drafter."""
    return Method(NoDrafter(), Chain(1), Exact())


def make_controller(choice: NoControllerConfig | MeasuredControllerConfig, tree: TreePolicy) -> Controller:
    """Return the configured controller for one engine with this tree."""
    if not isinstance(choice, MeasuredControllerConfig):
        return Controller()
    return GoodputController(tree.max_levels, choice.max_exploration)


def build_tree(config: MethodConfig) -> TreePolicy:
    """Build only the tree policy of a method."""
    tree: TreePolicy = _build(TREES, config.tree, "tree")
    return tree


def num_drafted_levels(config: MethodConfig, kind: str) -> int:
    """Return the number of levels of the deepest tree that drafters of this kind draft; 0 if there are none."""
    drafting = [method for method in config.methods if method.drafter.kind == kind]
    return max((build_tree(method).max_levels for method in drafting), default=0)


def build_lantern(choice: LanternAcceptanceConfig, codebook: Tensor, vocab_size: int) -> Lantern:
    """Build LANTERN's rule over the neighbours of a codebook (V, code_dim).

    Raises CodebookError or ConfigError if the codebook does not fit the target or k.
    """
    num_codes = codebook.shape[0]
    if num_codes != vocab_size:
        raise CodebookError(
            f"the codebook has {num_codes} codes, but the target draws from {vocab_size}: they do not belong together"
        )
    check_neighbours(choice, num_codes)
    proximity = Proximity(choice.metric, choice.codebook == "normalised", choice.seed)
    table = nearest_codes(codebook, min(num_codes - 1, MAX_NEIGHBOURS), proximity)
    options = (table, choice.k, choice.delta, choice.divergence, choice.k_counts_draft)
    return Lantern(*options) if choice.draw == "coupled" else LanternResidual(*options, residual=choice.draw)


def check_neighbours(choice: LanternAcceptanceConfig, num_codes: int) -> None:
    """Raise ConfigError if a codebook of `num_codes` codes has too few neighbours for `k`."""
    num_others = choice.k - 1 if choice.k_counts_draft else choice.k
    if num_others > num_codes - 1:
        raise ConfigError(
            f"method.acceptance.k: {choice.k} asks for {num_others} neighbours of a code, and a codebook of "
            f"{num_codes} codes has {num_codes - 1}; take a smaller k"
        )


def _build(family: dict[str, Callable[..., Any]], choice: Section, name: str) -> Any:
    if isinstance(choice, ExternalPartConfig):
        return external_part(choice, name)
    options = choice.model_dump()
    return family[options.pop("kind")](**options)


@dataclass(frozen=True)
class _Site:
    """What a drafter is built from: its options, the method's contexts, its model if it has one, and the target."""

    choice: Any
    contexts: Sequence[Section]
    model: Any
    target: TargetModel
    corpora: dict[int, Corpus]

    @property
    def merge(self) -> Merge:
        return SingleLane() if self.target.num_lanes == 1 else Guided()


def _external(site: _Site) -> Drafter:
    drafter: Drafter = external_part(site.choice, "drafter")
    return drafter


def _lookup(site: _Site) -> Drafter:
    choice = site.choice
    return LookupDrafter(choice.min_ngram_tokens, choice.max_ngram_tokens, choice.match)


def _suffix(site: _Site) -> Drafter:
    choice = site.choice
    corpus = site.corpora.setdefault(choice.max_corpus_tokens, Corpus(choice.max_corpus_tokens))
    return SuffixDrafter(choice.min_ngram_tokens, choice.max_ngram_tokens, corpus)


def _jacobi(site: _Site) -> Drafter:
    fill, grid = site.choice.fill, site.target.grid
    assert fill == "repeat" or grid is not None, "the schema allows 'above' for image models only"
    return JacobiDrafter(grid if fill == "above" else None)


def _layer_skip(site: _Site) -> Drafter:
    vocabulary = site.choice.vocabulary
    head = None if vocabulary is None else slice_head(site.target.head, vocabulary, site.target)
    return LayerSkipDrafter(site.choice.indices, head, site.merge)


def _eagle(site: _Site) -> Drafter:
    assert isinstance(site.model, EagleNetwork)
    head = slice_head(site.target.head, site.choice.vocabulary, site.target)
    return EagleDrafter(site.model, head, site.target.num_lanes, site.merge)


def _eagle3(site: _Site) -> Drafter:
    assert isinstance(site.model, Eagle3Network)
    make = EagleDrafter if site.model.shape.mask_token_id is None else ParallelEagleDrafter
    return make(site.model, site.model.output_layer(site.target.vocab_size), site.target.num_lanes, site.merge)


def _block(site: _Site) -> Drafter:
    assert isinstance(site.model, BlockNetwork)
    embedding = site.model.embedding(site.target.decoder.get_input_embeddings())  # type: ignore[operator]
    return BlockDrafter(site.model, embedding, site.model.output_layer(site.target.head, site.target.vocab_size))


def _mtp(site: _Site) -> Drafter:
    assert isinstance(site.target.mtp, MtpNetwork), "the pair loads the target's MTP layer"
    head = slice_head(site.target.head, site.choice.vocabulary, site.target)
    return MtpDrafter(site.target.mtp, head, site.target.num_lanes, site.merge)


def _medusa(site: _Site) -> Drafter:
    assert isinstance(site.model, MedusaHeads)
    heads = slice_medusa(site.model, site.choice.vocabulary, site.target)
    return MedusaDrafter(heads, site.target.num_lanes, site.merge)


def _model(site: _Site) -> Drafter:
    assert site.model is not None, "the schema requires model.drafter for the drafter 'model'"
    assert not isinstance(site.model, (FeatureStack, MedusaHeads, BlockNetwork))
    contexts: list[Context] = [_build(CONTEXTS, context, "contexts") for context in site.contexts]
    merge = site.merge
    if site.target.num_lanes > 1:
        assert len(contexts) == 1, "the schema allows no ensemble for an image model"
        # The drafter of a guided target has the same lanes as the target.
        contexts.append(Unconditional())
    elif len(contexts) > 1:
        merge = Ensemble(EnsembleOptions(**(site.choice.ensemble or EnsembleConfig()).model_dump()))
    model = slice_model(site.model, site.choice.vocabulary, site.target)
    return ModelDrafter(model, contexts, site.target.vocab_size, merge)


DRAFTERS: dict[str, Callable[[_Site], Drafter]] = {
    "none": lambda _: NoDrafter(),
    "grammar": lambda _: GrammarDrafter(),  # type: ignore[dict-item, return-value]
    "lookup": _lookup,
    "suffix": _suffix,
    "jacobi": _jacobi,
    "layer_skip": _layer_skip,
    "eagle": _eagle,
    "vispec": _eagle,
    "msd": _eagle,
    "eagle3": _eagle3,
    "block": _block,
    "medusa": _medusa,
    "mtp": _mtp,
    "model": _model,
}
