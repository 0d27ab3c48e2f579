"""The checks of methods pass for the built-in methods, and find every planted deviation from the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import Method
from decoding.acceptance import Exact, RandomRelaxation, Rejection
from decoding.conformance import suite, toys
from decoding.conformance.contract import ContractError
from decoding.conformance.suite import ALL, GREEDY, QUICK, SAMPLED, Check, Suite
from decoding.contexts import Full
from decoding.contracts import Acceptance, Drafter, TreePolicy, VerificationOutput
from decoding.drafters import LookupDrafter, ModelDrafter, NoDrafter
from decoding.tree import AcceptanceResult, DraftTree, Frontier
from decoding.trees import Chain, StaticTree, branching_paths
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch
from models.target import Target

GREEDY_ONLY = {"greedy": QUICK["greedy tokens, batch 3"]}
Make = Callable[[Target], Method]


def own(prefix: Prefix) -> list[Prefix]:
    return [prefix]


def with_parts(
    drafter: Callable[[], Drafter] = LookupDrafter,
    tree: Callable[[], TreePolicy] = lambda: Chain(3),
    acceptance: Callable[[], Acceptance] = Exact,
) -> Make:
    return lambda _: Method(drafter(), tree(), acceptance())


def similar() -> Drafter:
    return ModelDrafter(toys.similar(), [Full()], toys.VOCAB_SIZE)


def first_problem(make: Make, checks: dict[str, Check], prompts: Any = None) -> str:
    return next((result.problem for result in suite.run(Suite(make, prompts), checks) if result.problem), "")


@pytest.mark.parametrize(
    ("make", "prompts"),
    [
        (with_parts(), None),
        (with_parts(NoDrafter), None),
        (with_parts(similar, lambda: StaticTree(branching_paths([2, 2, 1]))), own),
        (with_parts(similar, acceptance=Rejection), own),
        (with_parts(similar, acceptance=lambda: RandomRelaxation(0.5)), own),
    ],
    ids=["lookup", "plain", "tree", "rejection", "relaxed"],
)
def test_methods_of_ours_pass(make: Make, prompts: Any) -> None:
    assert first_problem(make, QUICK, prompts) == ""


@pytest.mark.slow
def test_a_method_of_ours_passes_all_checks() -> None:
    assert first_problem(with_parts(similar, lambda: StaticTree(branching_paths([2, 2, 1]))), ALL, own) == ""


class Wide(LookupDrafter):
    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        return torch.nn.functional.pad(super().draft(slots, frontier), (0, 8))


class Flat(LookupDrafter):
    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        return super().draft(slots, frontier)[:, 0]


class Doubles(LookupDrafter):
    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        return super().draft(slots, frontier).double()


class Lists(LookupDrafter):
    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        return super().draft(slots, frontier).tolist()  # type: ignore[no-any-return]


class Raises(LookupDrafter):
    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> None:
        raise KeyError("mine")


class ReadsValues(LookupDrafter):
    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        logits = super().draft(slots, frontier)
        return logits * 2 if logits.max() > 1 else logits


class Prints(LookupDrafter):
    def commit(self, verification: VerificationOutput, result: AcceptanceResult) -> None:
        super().commit(verification, result)
        self.shown = f"{result.n}"


class CopiesFromTheHost(LookupDrafter):
    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        return super().draft(slots, frontier) + torch.tensor([0.0])


class Trees(Chain):
    """Changes finished trees."""

    change: Callable[[DraftTree], DraftTree]

    def __init__(self, change: Callable[[DraftTree], DraftTree]) -> None:
        super().__init__(3)
        self._change = change

    def finish(self) -> DraftTree:
        return self._change(super().finish())


class Results(Exact):
    """Changes results."""

    def __init__(self, change: Callable[[VerificationOutput, AcceptanceResult], AcceptanceResult]) -> None:
        self._change = change

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        return self._change(verification, super().accept(verification))


class TooDeep(Chain):
    max_levels = 1

    def grow(self, level: Any) -> Frontier | None:
        frontier = super().grow(level)
        return frontier or replace(self._last, depth=self._last.depth + 1)

    def start(self, *arguments: Any) -> Frontier:
        self._last = super().start(*arguments)
        return self._last


DRAFTERS: dict[str, tuple[type[Drafter], str]] = {
    "more logits than tokens": (Wide, "Wide.draft returned logits of shape (3, 1, 72), and it must be (3, 1, 64)"),
    "a missing dimension": (Flat, "Flat.draft returned logits of shape (3, 64), and it must be (3, 1, 64)"),
    "another type": (Doubles, "Doubles.draft returned logits of type float64, and it must be float32 or"),
    "no tensor": (Lists, "Lists.draft returned logits as list"),
    "an error": (Raises, "KeyError: 'mine'; "),
    "a read": (ReadsValues, "a step reads a value on the host, or copies one to the device: DataDependent"),
    "a print": (Prints, "HostRead: a tensor is printed or formatted"),
    "a copy": (CopiesFromTheHost, "a step reads a value on the host, or copies one to the device: HostRead"),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_deviations_of_drafters_are_found(name: str) -> None:
    drafter, problem = DRAFTERS[name]
    assert problem in first_problem(with_parts(drafter), QUICK)


def changed(**values: Callable[[DraftTree], Any]) -> Callable[[DraftTree], DraftTree]:
    return lambda tree: replace(tree, **{name: value(tree) for name, value in values.items()})


TREES: dict[str, tuple[Callable[[DraftTree], DraftTree], str]] = {
    "a token outside": (
        changed(tokens=lambda tree: torch.where(tree.depth > 0, tree.tokens + 64, tree.tokens)),
        "a token outside the target's vocabulary of 64",
    ),
    "a parent after its child": (
        changed(parents=lambda tree: torch.where(tree.depth > 0, 3, tree.parents), is_chain=lambda _: False),
        "a node whose parent does not precede it",
    ),
    "a wrong depth": (changed(depth=lambda tree: tree.depth * 2), "whose depth is not that of its parent plus 1"),
    "a hole": (
        changed(valid=lambda tree: tree.valid & (tree.depth != 1) | (tree.depth == 2)),
        "a valid node below an invalid one",
    ),
    "no root": (changed(valid=lambda tree: tree.valid & (tree.depth > 0)), "a tree whose node 0 is not the root"),
    "floats": (changed(tokens=lambda tree: tree.tokens.float()), "tree.tokens of type float32, and it must be int64"),
    "missing rows": (changed(valid=lambda tree: tree.valid[:1]), "tree.valid of shape (1, 4), and it must be (3, 4)"),
    "too many levels": (changed(num_levels=lambda _: 7), "a tree with num_levels 7, and it must be at most"),
}


@pytest.mark.parametrize("name", TREES)
def test_deviations_of_trees_are_found(name: str) -> None:
    change, problem = TREES[name]
    # All tokens are proposed, so that trees have drafts.
    reported = first_problem(with_parts(similar, lambda: Trees(change)), GREEDY_ONLY, own)
    assert f"Trees.finish returned {problem}" in reported or problem in reported, reported


def test_a_frontier_beyond_the_levels_of_a_step_is_found() -> None:
    problem = first_problem(with_parts(similar, lambda: TooDeep(1)), GREEDY_ONLY, own)
    assert "TooDeep.grow returned a frontier of depth 1" in problem


RESULTS: dict[str, tuple[Callable[[VerificationOutput, AcceptanceResult], AcceptanceResult], str]] = {
    "another token": (
        lambda output, result: replace(result, next=(result.next + 1) % 64),
        "token 1 of sample-0 differs from the target alone",
    ),
    "a token outside": (
        lambda output, result: replace(result, next=result.next + 64),
        "Results.accept returned a next token outside the target's vocabulary of 64",
    ),
    "n of zero": (
        lambda output, result: replace(result, n=result.n * 0),
        "Results.accept returned n outside of 1 to 4: 0",
    ),
    "no root": (
        lambda output, result: replace(result, path=result.path + 1, n=result.n * 0 + 1),
        "Results.accept returned a path that does not begin at the root",
    ),
    "all drafts": (
        lambda output, result: replace(
            result,
            path=torch.arange(output.tree.num_levels + 1).expand_as(result.path),
            n=torch.full_like(result.n, output.tree.num_levels + 1),
        ),
        "Results.accept returned a path over an invalid node",
    ),
    "a missing row": (
        lambda output, result: replace(result, n=result.n[:1]),
        "Results.accept returned n of shape (1), and it must be (3)",
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_deviations_of_acceptance_rules_are_found(name: str) -> None:
    change, problem = RESULTS[name]
    reported = first_problem(with_parts(similar, acceptance=lambda: Results(change)), GREEDY_ONLY, own)
    assert problem.split(" of shape")[0] in reported, reported


class RelaxesEnds(RandomRelaxation):
    """Marks every accepted draft as relaxed, those of special tokens too."""

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        result = super().accept(verification)
        return replace(result, relaxed=torch.ones_like(result.relaxed))


class DependsOnTheBatch(RandomRelaxation):
    """Accepts more if the batch is larger."""

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        self.probability = 1.0 if len(verification.slots.ids) > 1 else 0.0
        return super().accept(verification)


def test_relaxed_special_tokens_are_found() -> None:
    checks: dict[str, Check] = {"more rows": lambda own: own.check_output(SAMPLED, 3, 24)}
    problem = first_problem(with_parts(similar, acceptance=lambda: RelaxesEnds(0.5)), checks, own)
    assert "RelaxesEnds.accept returned a relaxed EOS or other special token" in problem


def test_a_lossy_rule_whose_tokens_follow_from_the_batch_is_found() -> None:
    checks: dict[str, Check] = {"batch 3": lambda own: own.check_output(GREEDY, 3, 9)}
    problem = first_problem(with_parts(similar, acceptance=lambda: DependsOnTheBatch(0.5)), checks, own)
    assert "differs from the same request alone" in problem


def test_parts_without_drafts_are_checked_too() -> None:
    class Nothing(LookupDrafter):
        def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
            return torch.full((*frontier.tokens.shape, 64), -torch.inf)

    assert first_problem(with_parts(Nothing), QUICK) == ""


def test_proxies_raise_the_error_of_the_contract() -> None:
    made = Suite(with_parts(Wide)).checked(toys.target())
    with pytest.raises(ContractError, match="Wide"):
        suite.decode(made, toys.target(), 1, suite.requests(1, GREEDY))
