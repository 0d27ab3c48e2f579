"""Restricted draft vocabularies: the output equals the target's for every vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact, Rejection
from decoding.contexts import Full, TextOnly
from decoding.contracts import Acceptance, Drafter, TreePolicy, VerificationOutput
from decoding.drafters import EagleDrafter, MedusaDrafter, ModelDrafter
from decoding.drafters.ensemble import Ensemble, EnsembleOptions
from decoding.tree import AcceptanceResult
from decoding.trees import DynamicTree, SageTree
from models.loading.vocabulary import SlicedHead
from tests import toys
from tests.conformance import checks, heads

pytestmark = pytest.mark.slow

TREES: dict[str, Callable[[], TreePolicy]] = checks.TREES | {"dynamic": lambda: DynamicTree(4, 3, 16), "sage": SageTree}
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.2)
HALF = range(0, toys.VOCAB_SIZE, 2)
FEWER = range(0, toys.VOCAB_SIZE, 5)
UNRELATED = range(3, 9)


def sliced(head: Any, tokens: Sequence[int]) -> SlicedHead:
    return SlicedHead.of(head, tokens, toys.VOCAB_SIZE)


def drafter(kind: str, family: str, tokens: Sequence[int]) -> Drafter:
    """A drafter with the vocabulary `tokens`."""
    target = toys.target(family)
    if kind == "eagle":
        return EagleDrafter(copy.deepcopy(heads.eagle(family)), sliced(target.head, tokens))
    if kind == "medusa":
        whole = heads.medusa(family)
        return MedusaDrafter(whole.with_outputs([sliced(list(own.children())[-1], tokens) for own in whole]))
    model = copy.copy(toys.target(family) if kind == "right" else toys.perturbed(family, 0.02))
    model.head = sliced(model.head, tokens)
    if kind == "ensemble":
        second = TextOnly() if toys.FAMILIES[family].takes_images else Full()
        return ModelDrafter(model, [Full(), second], toys.VOCAB_SIZE, Ensemble(EnsembleOptions("error", steps=4)))
    return ModelDrafter(model, [Full()], toys.VOCAB_SIZE)


class Inside(checks.Recorder):
    """Checks that nodes and draft distributions contain only `tokens`."""

    def __init__(self, rule: Acceptance, tokens: Sequence[int]) -> None:
        super().__init__(rule)
        self.allowed = torch.zeros(toys.VOCAB_SIZE, dtype=torch.bool).index_fill(0, torch.tensor([*tokens]), True)
        self.num_drafts = 0

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        tree = verification.tree
        drafts = tree.valid & (tree.parents >= 0)
        assert bool(self.allowed[tree.tokens[drafts]].all()), tree.tokens[drafts].tolist()
        self.num_drafts += int(drafts.sum())
        if tree.draft_probs is not None:
            assert float(tree.draft_probs[..., ~self.allowed].abs().sum()) == 0.0, "q outside of the slice"
            totals = tree.draft_probs.sum(dim=-1)[tree.has_drafts()]
            torch.testing.assert_close(totals, torch.ones_like(totals))
        return super().accept(verification)


def engine_of(
    kind: str, family: str, tree: str, tokens: Sequence[int], rule: Acceptance, slots: int = 4
) -> tuple[Engine, Inside]:
    watched = Inside(rule, tokens)
    return Engine(
        toys.target(family), Method(drafter(kind, family, tokens), TREES[tree](), watched), slots, 160
    ), watched


def check(
    kind: str, family: str, tree: str, tokens: Sequence[int], sampling: Sampling | None = None, rule: Any = None
) -> tuple[int, int]:
    """Output equals the oracle's token for token; returns drafts offered and accepted."""
    engine, watched = engine_of(kind, family, tree, tokens, rule or Exact())
    wanted = checks.requests(family, 6, sampling, longest=20)
    done = checks.run(engine, wanted)
    oracle = checks.referenced if sampling else checks.generated
    for request in wanted:
        expected = oracle(family, request, engine.target.eos_ids)
        assert done[request.sample_id].token_ids == expected, request.sample_id
        checks.check_telemetry(done[request.sample_id])
    return watched.num_drafts, sum(c.telemetry.num_accepted_draft_tokens for c in done.values())


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", list(TREES))
@pytest.mark.parametrize("tokens", [HALF, UNRELATED, [11]], ids=["half", "few", "one"])
def test_the_output_is_the_targets_own_for_any_draft_vocabulary(
    tokens: Sequence[int], tree: str, sampling: Sampling | None
) -> None:
    offered, _ = check("perturbed", "llama", tree, tokens, sampling)
    assert offered > 0


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("kind", "family"), [("perturbed", "llava"), ("ensemble", "llava"), ("eagle", "llama"), ("medusa", "llama")]
)
def test_every_drafter_with_an_output_layer_may_have_half_of_it(
    kind: str, family: str, sampling: Sampling | None
) -> None:
    offered, accepted = check(kind, family, "branching", HALF, sampling)
    assert offered > accepted > 0


def test_a_draft_vocabulary_without_any_right_token_gives_plain_decoding() -> None:
    wanted = checks.requests("llama", 6, longest=20)
    values = {token for request in wanted for token in checks.generated("llama", request, toys.target("llama").eos_ids)}
    never = sorted(set(range(toys.VOCAB_SIZE)) - values)
    assert len(never) > 5
    offered, accepted = check("right", "llama", "branching", never)
    assert offered > 0
    assert accepted == 0


def test_the_targets_own_drafts_are_accepted_up_to_the_first_token_outside_the_draft_vocabulary() -> None:
    request = Request("one", toys.prompt("llama", 0)[0], (), Sampling(max_new_tokens=16))
    result = checks.generated("llama", request, frozenset())
    missing = result[4]
    tokens = [token for token in range(toys.VOCAB_SIZE) if token != missing]
    engine, _ = engine_of("right", "llama", "chain", tokens, Exact())
    engine.target.eos_ids = frozenset()
    done = checks.run(engine, [request])["one"]
    assert done.token_ids == result
    # The prefill gives the first token; chains of 4 stop before each place of the missing token.
    steps, index = [], 1
    while index < len(result):
        accepted = 0
        while accepted < 4 and index + accepted < len(result) - 1 and result[index + accepted] != missing:
            accepted += 1
        steps.append(accepted)
        index += accepted + 1
    histogram = [steps.count(depth) for depth in range(5)]
    assert list(done.telemetry.acceptance_histogram) == histogram
    assert histogram[4] < len(steps)


@pytest.mark.parametrize("tree", ["chain", "branching"])
def test_a_text_ends_at_an_eos_that_is_never_drafted(tree: str) -> None:
    base = Request("eos", toys.prompt("llama", 1)[0], (), Sampling(max_new_tokens=16))
    full = checks.generated("llama", base, frozenset())
    for token in sorted(set(full)):
        engine, _ = engine_of("right", "llama", tree, sorted(set(range(toys.VOCAB_SIZE)) - {token}), Exact())
        engine.target.eos_ids = frozenset([token])
        done = checks.run(engine, [base])["eos"]
        assert done.token_ids == full[: full.index(token) + 1]
        assert done.finish_reason == "stop"


@pytest.mark.parametrize("kind", ["right", "ensemble"])
@pytest.mark.parametrize("tree", ["chain", "branching"])
def test_rejection_sampling_at_temperature_zero_is_greedy_for_any_draft_vocabulary(kind: str, tree: str) -> None:
    check(kind, "llava" if kind == "ensemble" else "llama", tree, FEWER, rule=Rejection())


@pytest.mark.parametrize("kind", ["perturbed", "ensemble"])
@pytest.mark.parametrize("tokens", [FEWER, [11]], ids=["fewer", "one"])
@pytest.mark.parametrize("tree", ["chain", "branching"])
def test_rejection_sampling_draws_from_the_targets_distribution_for_any_draft_vocabulary(
    tree: str, tokens: Sequence[int], kind: str
) -> None:
    assert joint(tree, tokens, kind) < 2.1


def joint(tree: str, tokens: Sequence[int], kind: str = "perturbed") -> float:
    return checks.joint_of_two_tokens(TREES[tree], Inside(Rejection(), tokens), 3000, drafter(kind, "llama", tokens))


# --- faults --------------------------------------------------------------------------------------------------------
