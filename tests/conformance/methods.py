"""Every method on toy models, one line each, which the conformance suite runs on every family.

Lossy rules are at their zero setting, at which they equal the target's output. A new method adds one line.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

from torch import nn

from decoding import Engine, Method, Sampling
from decoding.acceptance import Exact, Fly, Lantern, LVSpec, RandomRelaxation, Typical
from decoding.contexts import Full, Pooled, Pruned, TextOnly
from decoding.contracts import Acceptance, Context, TreePolicy
from decoding.drafters import JacobiDrafter, LayerSkipDrafter, LookupDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from decoding.drafters.ensemble import Ensemble, EnsembleOptions, Policy
from decoding.drafters.suffix_index import Corpus
from decoding.trees import Chain, DynamicTree, OnlineSageTree, SageTree, StaticTree, branching_paths
from decoding.trees.static import SPECVLM_PATHS
from models.loading.vocabulary import SlicedHead
from tests import toys
from tests.conformance import block, checks, heads
from tests.conformance.relaxation import NEIGHBOURS
from tests.covering import covering

Make = Callable[[str], Method]
VISUAL = tuple(name for name, family in toys.FAMILIES.items() if family.takes_images)
EVERY = tuple(toys.FAMILIES)


def drafted(
    contexts: list[Context],
    tree: Callable[[], TreePolicy],
    rule: Acceptance | None = None,
    policy: Policy | None = None,
) -> Make:
    """A method that drafts with the perturbed target and `contexts`."""

    def make(family: str) -> Method:
        merge = Ensemble(EnsembleOptions(policy, steps=4)) if policy else None
        drafter = ModelDrafter(toys.perturbed(family, 0.02), contexts, toys.VOCAB_SIZE, merge)
        return Method(drafter, tree(), rule or Exact())

    return make


def sliced(contexts: list[Context], tree: Callable[[], TreePolicy], policy: Policy | None = None) -> Make:
    """A method with every other token as its draft vocabulary."""

    def make(family: str) -> Method:
        model = copy.copy(toys.perturbed(family, 0.02))
        assert isinstance(model.head, nn.Linear)
        model.head = SlicedHead.of(model.head, range(0, model.vocab_size, 2), toys.VOCAB_SIZE)
        merge = Ensemble(EnsembleOptions(policy, steps=4)) if policy else None
        return Method(ModelDrafter(model, contexts, toys.VOCAB_SIZE, merge), tree(), Exact())

    return make


def headed(kind: str, tree: Callable[[], TreePolicy]) -> Make:
    """A method that drafts with heads on the target."""
    return lambda family: Method(heads.make_drafter(kind, toys.target(family)), tree(), Exact())


def skipping(layers: list[int], tree: Callable[[], TreePolicy]) -> Make:
    """A method that drafts with some of the target's layers."""
    return lambda _: Method(LayerSkipDrafter(layers), tree(), Exact())


def blocks(tree: Callable[[], TreePolicy]) -> Make:
    """A method that drafts with a block drafter on the target."""
    return lambda family: Method(block.make_drafter(family, toys.target(family)), tree(), Exact())


def five() -> TreePolicy:
    return Chain(5)


def bush() -> TreePolicy:
    return StaticTree(branching_paths([2, 2, 1]))


def specvlm() -> TreePolicy:
    return StaticTree(SPECVLM_PATHS)


def two_branches() -> TreePolicy:
    return StaticTree([(first, *(0,) * depth) for first in (0, 1) for depth in range(5)])


MT: list[Context] = [Full(), TextOnly()]
METHODS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "plain": (lambda _: Method(NoDrafter(), Chain(1), Exact()), EVERY),
    "sd-chain": (drafted([Full()], five), EVERY),
    "sd-tree": (drafted([Full()], specvlm), EVERY),
    "sd-text": (drafted([TextOnly()], five), VISUAL),
    "sd-pooled": (drafted([Pooled()], five), ("llava", "qwen2_5_vl", "qwen3_vl")),
    "specvlm": (drafted([Pruned(0.5, "attention")], specvlm), VISUAL),
    "pruned-compact": (drafted([Pruned(0.7, positions="compact")], five), VISUAL),
    "tabed": (drafted(MT, five, policy="matches"), VISUAL),
    "tabed-inverse": (drafted([*MT, Pruned(0.5)], five, policy="inverse_linear"), VISUAL),
    "tabed-tree": (drafted(MT, bush, policy="error"), VISUAL),
    "sage": (drafted([Pruned(0.5)], SageTree), VISUAL),
    "sage-online": (drafted([Full()], OnlineSageTree), EVERY),
    "vocabulary": (sliced([Full()], specvlm), EVERY),
    "tabed-vocabulary": (sliced(MT, bush, policy="error"), VISUAL),
    "lookup": (lambda _: Method(LookupDrafter(), five(), Exact()), EVERY),
    "jacobi": (lambda _: Method(JacobiDrafter(), five(), Exact()), EVERY),
    "suffix": (lambda _: Method(SuffixDrafter(corpus=Corpus(64)), five(), Exact()), EVERY),
    "dynamic": (drafted([Full()], lambda: DynamicTree(4, 3, 16)), EVERY),
    "layer-skip": (skipping([0], five), EVERY),
    "layer-skip-tree": (skipping([1], specvlm), EVERY),
    # The drafter runs more nodes than the tree keeps.
    "layer-skip-dynamic": (skipping([0], lambda: DynamicTree(4, 3, 5)), EVERY),
    "eagle": (headed("eagle", lambda: DynamicTree(4, 3, 16)), ("llama",)),
    "vispec": (headed("vispec", lambda: DynamicTree(4, 3, 16)), ("llava", "qwen2_5_vl")),
    "msd": (headed("msd", bush), ("llava", "qwen2_5_vl")),
    "medusa": (headed("medusa", bush), ("llama",)),
    "block": (blocks(lambda: Chain(4)), ("llama", "llava", "qwen2_5_vl")),
    "block-tree": (blocks(bush), ("llama", "llava", "qwen2_5_vl")),
    "block-dynamic": (blocks(lambda: DynamicTree(4, 3, 16)), ("llama",)),
    "lvspec-zero": (drafted([Pruned(0.5)], five, LVSpec(0.0, 3, position_shift=False)), VISUAL),
    "lvspec-tree-zero": (drafted([Full()], two_branches, LVSpec(0.0, 3, position_shift=False)), VISUAL),
    "fly-zero": (drafted([Full()], five, Fly(min_entropy=100.0, window=1)), EVERY),
    "random-zero": (drafted([Full()], bush, RandomRelaxation(0.0)), EVERY),
    "typical-zero": (drafted([Full()], bush, Typical(epsilon=1.0, alpha=1e9)), EVERY),
    "lantern-zero": (drafted([Full()], bush, Lantern(NEIGHBOURS, 60, 0.0)), EVERY),
    "jacobi+typical-zero": (lambda _: Method(JacobiDrafter(), five(), Typical(epsilon=1.0, alpha=1e9)), EVERY),
    # Combinations without a paper.
    "tabed+sage+lvspec-zero": (
        drafted(MT, SageTree, LVSpec(0.0, 3, position_shift=False), policy="inverse_softmax"),
        VISUAL,
    ),
    "tabed+dynamic": (drafted(MT, lambda: DynamicTree(3, 2, 10), policy="adaboost"), VISUAL),
    "lookup+sage+fly-zero": (lambda _: Method(LookupDrafter(), SageTree(), Fly(min_entropy=100.0, window=0)), EVERY),
}
FAST = ("plain", "sd-chain", "tabed-tree", "sage", "eagle", "medusa", "block", "layer-skip", "jacobi", "suffix")
"""One method of each kind of drafter and tree."""
SLOTS = (1, 4, 9)
MODES = {"greedy": Sampling(), "sampled": Sampling(temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.2)}
Case = tuple[str, str, int, str]


def every_case() -> list[Case]:
    """The full product of method, family, batch and mode."""
    return [
        (method, family, slots, mode)
        for method, (_, families) in METHODS.items()
        for family, slots, mode in product(families, SLOTS, MODES)
    ]


def covering_cases() -> list[Case]:
    """A covering set of all legal pairs of values."""
    return covering(every_case(), 2)


def check_case(case: Case, count: int = 5) -> float:
    """Output equals the oracle's token for token; returns the mean acceptance length."""
    name, family, slots, mode = case
    target = toys.target(family)
    engine = Engine(target, METHODS[name][0](family), slots, 160)
    wanted = checks.requests(family, count, MODES[mode], longest=16)
    done = checks.run(engine, wanted)
    oracle = checks.generated if mode == "greedy" else checks.referenced
    for request in wanted:
        completion = done[request.sample_id]
        assert completion.token_ids == oracle(family, request, target.eos_ids), (case, request.sample_id)
        checks.check_telemetry(completion)
        assert completion.telemetry.num_relaxed_accepts == 0
    return sum(c.telemetry.mean_acceptance_length for c in done.values()) / count
