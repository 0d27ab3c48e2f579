"""From a method's four configured choices to its parts.

The one place where names in a YAML meet classes. Each family is a plain mapping from the schema's class to a maker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from actors.loading.vocabulary import slice_head, slice_medusa, slice_model
from configs import acceptance as rules
from configs import contexts as seen
from configs import controllers
from configs import drafters as heads
from configs import method as choices
from configs import trees as adaptive
from decoding.acceptance import Exact, Fly, Lantern, LanternResidual, LVSpec, RandomRelaxation, Rejection, Typical
from decoding.contexts import Caption, Full, Pooled, Pruned, TextOnly, Unconditional
from decoding.contracts import Acceptance, Context, Drafter, Method, TreePolicy
from decoding.controllers.base import Controller, FixedDepth
from decoding.controllers.goodput import GoodputController
from decoding.drafters import EagleDrafter, LookupDrafter, MedusaDrafter, ModelDrafter, NoDrafter
from decoding.drafters.ensemble import Ensemble, EnsembleOptions
from decoding.drafters.merge import Guided, Merge, SingleLane
from decoding.trees import Chain, DynamicTree, OnlineSageTree, SageSettings, SageTree, StaticTree, branching_paths
from decoding.trees.static import NAMED_PATHS, SPECVLM_PATHS
from models.captioner import Captioner
from models.contract import TargetModel
from models.heads.eagle import EagleNetwork
from models.heads.medusa import MedusaHeads
from models.llamagen.neighbours import MAX_NEIGHBOURS, CodebookError, Proximity, cache_folder, neighbour_table
from models.loading.checkpoints import CheckpointRef

CONTEXTS: dict[type, Callable[[Any], Context]] = {
    seen.FullContext: lambda _: Full(),
    seen.TextOnlyContext: lambda _: TextOnly(),
    seen.PooledContext: lambda _: Pooled(),
    seen.PrunedContext: lambda c: Pruned(c.ratio, c.guidance, c.attention_share, c.positions),
    seen.CaptionContext: lambda c: Caption(load_captioner(c), c.lead),
}
TREES: dict[type, Callable[[Any], TreePolicy]] = {
    choices.ChainTree: lambda tree: Chain(tree.length),
    choices.StaticTree: lambda tree: StaticTree(static_paths(tree)),
    choices.DynamicTree: lambda tree: DynamicTree(tree.top_k, tree.depth, tree.total_tokens),
    adaptive.SageTree: lambda tree: build_sage(tree),
}
ACCEPTANCES: dict[type, Callable[[Any], Acceptance]] = {
    rules.ExactAcceptance: lambda _: Exact(),
    rules.RejectionAcceptance: lambda _: Rejection(),
    rules.LVSpecAcceptance: lambda rule: LVSpec(rule.loose, rule.top_visual, rule.position_shift, rule.relevance_of),
    rules.FlyAcceptance: lambda rule: Fly(rule.min_entropy, rule.window, rule.top, rule.block_end),
    rules.RandomAcceptance: lambda rule: RandomRelaxation(rule.probability),
    rules.TypicalAcceptance: lambda rule: Typical(rule.epsilon, rule.alpha, rule.temperature),
}

CONTROLLERS: dict[type, Callable[[Any, TreePolicy], Controller]] = {
    controllers.NoController: lambda *_: FixedDepth(),
    controllers.MeasuredController: lambda choice, tree: GoodputController(tree.max_levels, choice.max_exploration),
}


def build_method(
    config: choices.Method,
    drafter_model: TargetModel | EagleNetwork | MedusaHeads | None,
    target: TargetModel,
    codebook: Tensor | None = None,
) -> Method:
    """Parts of a method for one engine over `target`. Parts hold state per slot, so each engine needs its own.

    `codebook` (V, code_dim) holds the stored codes of an image target, for rules that compare codes.

    Raises:
        CodebookError: the codebook does not belong to the target, or is too small for the rule.
        ConfigError: the drafter has none of the draft vocabulary, or no output layer with rows.
    """
    drafter: Drafter
    if isinstance(config.drafter, choices.NoDrafter):
        drafter = NoDrafter()
    elif isinstance(config.drafter, heads.EagleDrafter):
        assert isinstance(drafter_model, EagleNetwork)
        head = slice_head(target.head, config.drafter.vocabulary, target)
        drafter = EagleDrafter(drafter_model, head, target.num_lanes, _head_merge(target))
    elif isinstance(config.drafter, heads.MedusaDrafter):
        assert isinstance(drafter_model, MedusaHeads)
        medusa = slice_medusa(drafter_model, config.drafter.vocabulary, target)
        drafter = MedusaDrafter(medusa, target.num_lanes, _head_merge(target))
    elif isinstance(config.drafter, heads.LookupDrafter):
        choice = config.drafter
        drafter = LookupDrafter(choice.min_ngram_tokens, choice.max_ngram_tokens, choice.match)
    else:
        assert drafter_model is not None, "the schema lets no drafter 'model' through without model.drafter"
        assert not isinstance(drafter_model, (EagleNetwork, MedusaHeads))
        contexts = [CONTEXTS[type(context)](context) for context in config.contexts]
        merge = _merge(config.drafter.ensemble, len(contexts))
        if target.num_lanes > 1:
            assert len(contexts) == 1, "the schema lets no ensemble through for an image model"
            # The drafter of a guided target has the same lanes as the target.
            contexts, merge = [*contexts, Unconditional()], Guided()
        model = slice_model(drafter_model, config.drafter.vocabulary, target)
        drafter = ModelDrafter(model, contexts, target.vocab_size, merge)
    rule: Acceptance
    if isinstance(config.acceptance, rules.LanternAcceptance):
        assert codebook is not None, "the schema lets no acceptance 'lantern' through without a codebook"
        rule = build_lantern(config.acceptance, codebook, target.vocab_size)
    else:
        rule = ACCEPTANCES[type(config.acceptance)](config.acceptance)
    tree = build_tree(config)
    return Method(drafter, tree, rule, CONTROLLERS[type(config.controller)](config.controller, tree))


def plain_method() -> Method:
    """The parts of plain decoding."""
    return Method(NoDrafter(), Chain(1), Exact())


def build_lantern(choice: rules.LanternAcceptance, codebook: Tensor, vocab_size: int) -> Lantern:
    """LANTERN's rule with the neighbours of a codebook (V, code_dim), which are looked up or made.

    Raises:
        CodebookError: the codebook has other codes than the target, or fewer than k.
    """
    num_codes = codebook.shape[0]
    if num_codes != vocab_size:
        raise CodebookError(
            f"the codebook has {num_codes} codes, but the target draws from {vocab_size}: they do not belong together"
        )
    num_others = choice.k - 1 if choice.k_counts_draft else choice.k
    if num_others > num_codes - 1:
        raise CodebookError(
            f"method.acceptance.k {choice.k} asks for {num_others} neighbours, and a codebook of {num_codes} codes has "
            f"{num_codes - 1}; take a smaller k"
        )
    proximity = Proximity(choice.metric, choice.codebook == "normalised", choice.seed)
    # As many as are ever kept, so that all k share one table.
    table = neighbour_table(codebook, min(num_codes - 1, MAX_NEIGHBOURS), proximity, cache_folder())
    options = (table, choice.k, choice.delta, choice.divergence, choice.k_counts_draft)
    return Lantern(*options) if choice.draw == "coupled" else LanternResidual(*options, choice.draw)


def static_paths(choice: choices.StaticTree) -> Sequence[tuple[int, ...]]:
    """The paths of a static tree."""
    if choice.name is not None:
        return NAMED_PATHS[choice.name]
    return choice.paths or branching_paths(choice.branching)


def build_tree(config: choices.Method) -> TreePolicy:
    """The tree policy alone."""
    return TREES[type(config.tree)](config.tree)


def num_medusa_levels(config: choices.Method) -> int:
    """How deep the deepest tree is that Medusa heads have to fill, one level for each head."""
    drafting = [one for one in config.methods if isinstance(one.drafter, heads.MedusaDrafter)]
    return max((build_tree(one).max_levels for one in drafting), default=0)


def build_sage(choice: adaptive.SageTree) -> TreePolicy:
    """SAGE's policy, planned or online."""
    settings = SageSettings(**choice.model_dump(exclude={"kind", "growth", "first_paths"}))
    if choice.growth == "online":
        return OnlineSageTree(settings)
    return SageTree(settings, choice.first_paths or SPECVLM_PATHS)


def load_captioner(choice: seen.CaptionContext) -> Captioner:
    """The small model behind a caption context."""
    ref = CheckpointRef(choice.path, choice.revision)
    return Captioner.load(ref, choice.prompt, choice.dtype, choice.device, choice.num_beams, choice.max_new_tokens)


def _head_merge(target: TargetModel) -> Merge:
    """A head has the target's own lanes."""
    return SingleLane() if target.num_lanes == 1 else Guided()


def _merge(choice: seen.EnsembleChoice | None, num_lanes: int) -> Merge:
    if num_lanes == 1:
        return SingleLane()
    return Ensemble(EnsembleOptions(**(choice or seen.EnsembleChoice()).model_dump()))
