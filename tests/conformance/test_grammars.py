"""Tests structured output with every method on toy models: tokens equal the target's under a logits processor."""

from __future__ import annotations

import re

import pytest

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact, Fly, RandomRelaxation, Rejection, Typical
from decoding.contracts import Acceptance
from decoding.drafters import GrammarDrafter, LookupDrafter, ModelDrafter, NoDrafter
from decoding.trees import Chain, StaticTree, branching_paths
from tests import toys
from tests.conformance import checks, grammars, methods
from tests.covering import tiers

pytestmark = pytest.mark.slow

FORCED = {
    "grammar": lambda _: Method(GrammarDrafter(), Chain(6), Exact()),  # type: ignore[arg-type]
    "grammar+lookup": lambda _: Method(GrammarDrafter(LookupDrafter()), Chain(5), Exact()),  # type: ignore[arg-type]
    "grammar+model": lambda family: before(family, "perturbed", "chain"),
    "grammar+model-tree": lambda family: before(family, "perturbed", "ragged"),
}


def before(family: str, drafter: str, tree: str) -> Method:
    """Forced tokens before the drafts of a model."""
    return Method(GrammarDrafter(checks.make_drafter(drafter, family)), checks.TREES[tree](), Exact())  # type: ignore[arg-type]


def relaxed(rule: Acceptance, is_legal: bool) -> methods.Make:
    """Drafts of another model: mostly forbidden ones, or if `is_legal`, only what the grammar allows."""

    def make(family: str) -> Method:
        drafter = checks.make_drafter("wrong", family)
        return Method(GrammarDrafter(drafter) if is_legal else drafter, Chain(4), rule)  # type: ignore[arg-type]

    return make


# One family for each method: the mask is applied after the parts in which families differ.
FAMILIES = {name: "llava" if "llava" in families else families[0] for name, (_, families) in methods.METHODS.items()}


@tiers("name, mode", list(methods.METHODS), list(methods.MODES), strength=1)
def test_every_method_equals_generate_with_a_mask(name: str, mode: str) -> None:
    grammars.check_equal(methods.METHODS[name][0], FAMILIES[name], methods.MODES[mode])


@tiers("name, family, mode", list(FORCED), ["llama", "llava"], list(methods.MODES))
def test_forced_tokens_are_accepted_and_change_nothing(name: str, family: str, mode: str) -> None:
    assert grammars.check_equal(FORCED[name], family, methods.MODES[mode], count=8) > 1.15


@tiers("tree, slots", list(checks.TREES), [1, 4, 9], strength=1)
def test_trees_equal_generate_in_every_batch(tree: str, slots: int) -> None:
    make = lambda family: Method(checks.make_drafter("perturbed", family), checks.TREES[tree](), Exact())  # noqa: E731
    grammars.check_equal(make, slots=slots, count=9)


@pytest.mark.parametrize("name", ["grammar", "grammar+model"])
def test_asynchronous_output_processing_changes_nothing(name: str) -> None:
    grammars.check_equal(FORCED[name], async_output=True)
    grammars.check_equal(methods.METHODS["sd-chain"][0], async_output=True)


def test_forced_tokens_raise_the_acceptance_of_a_model() -> None:
    alone = grammars.check_equal(methods.METHODS["sd-chain"][0], count=8)
    assert grammars.check_equal(FORCED["grammar+model"], count=8) > alone + 0.3


RELAXED = {
    "random": RandomRelaxation(1.0),
    "random sometimes": RandomRelaxation(0.5),
    "typical": Typical(epsilon=0.0, alpha=0.0),
    "fly": Fly(min_entropy=0.0, window=0),
}


@pytest.mark.parametrize("name", list(RELAXED))
def test_relaxed_rules_never_accept_a_forbidden_token(name: str) -> None:
    grammars.check_lossy(relaxed(RELAXED[name], is_legal=False))
    assert grammars.check_lossy(relaxed(RELAXED[name], is_legal=True)) > 0, "no draft was relaxed"


def test_rejection_sampling_under_a_grammar_has_the_distribution_of_the_masked_target() -> None:
    # Four choices as the first text; the chi-square statistic has three degrees of freedom, 99.9 % are below 16.3.
    schema = {"enum": ["ab", "abc", "trunk", 10]}
    made = grammars.Grammar(grammars.schema_source(schema), grammars.vocabulary())
    prompt, _ = toys.prompt("llama", 5)
    sampling = Sampling(max_new_tokens=12, temperature=2.5)
    counts: list[dict[str, int]] = []
    for rule, drafter in ((Exact(), NoDrafter()), (Rejection(), checks.make_drafter("wrong", "llama"))):
        tree = StaticTree(branching_paths([2, 2])) if isinstance(drafter, ModelDrafter) else Chain(1)
        wanted = [Request(f"d{i}", prompt, (), sampling, seed=9, grammar=made) for i in range(1500)]
        engine = Engine(toys.target("llama"), Method(drafter, tree, rule), 250, 64)
        seen: dict[str, int] = {}
        for completion in checks.run(engine, wanted).values():
            text = grammars.tokenizer().decode(list(completion.token_ids[:-1]))
            assert completion.finish_reason == "stop"
            seen[text] = seen.get(text, 0) + 1
        assert set(seen) <= {'"ab"', '"abc"', '"trunk"', "10"}
        counts.append(seen)
    plain, other = counts
    statistic = sum(
        (plain.get(text, 0) - other.get(text, 0)) ** 2 / (plain.get(text, 0) + other.get(text, 0))
        for text in plain.keys() | other.keys()
    )
    assert len(plain) >= 3, "too few cells to tell anything"
    assert statistic < 16.3, counts


def test_a_grammar_that_the_vocabulary_cannot_follow_fails_its_row_and_no_other() -> None:
    # The second character cannot be written: no token holds a byte of it.
    dead = grammars.Grammar(grammars.schema_source({"const": "aZ"}), grammars.vocabulary())
    first, other = grammars.requests("llama", 2)
    lost = Request("lost", first.prompt, first.images, first.sampling, grammar=dead)
    for make in (methods.METHODS["plain"][0], methods.METHODS["sd-tree"][0], FORCED["grammar+model"]):
        done = {c.sample_id: c for c in Engine(toys.target("llama"), make("llama"), 2, 160).run([lost, first, other])}
        error = done["lost"].error
        assert error is not None
        assert error.code == "grammar_failed"
        # A draft may be accepted before the dead end; the token after it then follows no grammar.
        assert re.search(r"no token .* continues the structure|does not continue the structure", error.message)
        assert done["lost"].finish_reason == "error"
        for request in (first, other):
            assert done[request.sample_id].token_ids == grammars.expected("llama", request)


@pytest.mark.parametrize("sampling", [Sampling(stop=("}",)), Sampling(ignore_eos=True)])
def test_a_request_with_a_grammar_refuses_other_ends(sampling: Sampling) -> None:
    with pytest.raises(ValueError, match="takes neither stop strings nor ignore_eos"):
        Request("one", "<s> w5", (), sampling, grammar=grammars.grammar())
