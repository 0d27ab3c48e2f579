"""No relaxed rule synchronises with the device: it runs on tensors without values, and compiles to one graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from decoding.acceptance import Fly, Lantern, LanternResidual, LVSpec, RandomRelaxation, Typical
from decoding.acceptance.relaxed import RelaxedRule
from decoding.contracts import Judgement
from decoding.tree import Verdict
from tests.decoding import blocks

pytestmark = pytest.mark.slow

NEIGHBOURS = torch.stack([(torch.arange(blocks.VOCAB_SIZE) + step) % blocks.VOCAB_SIZE for step in range(1, 40)], dim=1)
RULES: dict[str, Callable[[], RelaxedRule]] = {
    "lvspec": lambda: LVSpec(0.5, 3, True),
    "lvspec-before": lambda: LVSpec(0.5, 3, True, "before"),
    "fly": lambda: Fly(0.1, 1),
    "fly-gate": lambda: Fly(0.1, 0),
    "random": lambda: RandomRelaxation(0.5),
    "typical": Typical,
    "lantern": lambda: Lantern(NEIGHBOURS, 9, 0.3),
    "lantern-jsd": lambda: Lantern(NEIGHBOURS, 9, 0.3, "jsd"),
    "lantern++": lambda: Lantern(NEIGHBOURS, 9, 4.0, "multiplicative", k_counts_draft=False),
    "lantern-paper": lambda: LanternResidual(NEIGHBOURS, 9, 0.3),
    "lantern-code": lambda: LanternResidual(NEIGHBOURS, 9, 0.3, residual="code"),
    "lantern-alone": lambda: Lantern(NEIGHBOURS, 1, 0.3),
}
PARENTS = {"chain": [-1, 0, 1, 2, 3], "tree": [-1, 0, 0, 1, 2]}


def made(name: str) -> RelaxedRule:
    rule = RULES[name]()
    rule.open(blocks.spec())
    generator = torch.Generator().manual_seed(0)
    visual = [torch.randn(count, 4, generator=generator) for count in (3, 0, 7)]
    rule.admit(blocks.slots(0, 1, 2), [blocks.probe(states) for states in visual])
    return rule


def case(shape: str, temperature: float) -> Judgement:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(10, 16, (3, 5), generator=generator)
    tokens[:, 2] = (tokens[:, 1] - 9) % 6 + 10  # siblings differ
    logits = torch.randn(3, 5, blocks.VOCAB_SIZE, generator=generator) * 3
    states = torch.randn(3, 5, 4, generator=generator)
    return blocks.judgement(blocks.tree(tokens.tolist(), PARENTS[shape]), logits, states, temperature=temperature)


def parts(verdict: Verdict) -> dict[str, torch.Tensor]:
    """What a verdict has; what comes on the way is there for some rules only."""
    return {name: value for name, value in vars(verdict).items() if value is not None}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", list(PARENTS))
@pytest.mark.parametrize("name", list(RULES))
def test_a_rule_judges_tensors_that_have_no_values(name: str, shape: str, temperature: float) -> None:
    rule = made(name)
    one = case(shape, temperature)
    real = rule.judge(one)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = rule.judge(one)
    shapes = [{part: value.shape for part, value in parts(one).items()} for one in (fake, real)]
    assert shapes[0] == shapes[1]
    assert all(isinstance(value, torch._subclasses.FakeTensor) for value in parts(fake).values())


@pytest.mark.parametrize("name", list(RULES))
def test_a_rule_compiles_into_one_graph(name: str) -> None:
    rule = made(name)
    for shape in PARENTS:
        one = case(shape, 0.8)
        expected = rule.judge(one)

        def judge(logits: torch.Tensor, hidden: torch.Tensor, one: Judgement = one) -> tuple[torch.Tensor, ...]:
            verdict: Verdict = rule.judge(
                Judgement(one.slots, one.tree, logits, logits / 0.8, hidden, hidden, one.noise, one.rows)
            )
            return verdict.path, verdict.n, verdict.next, verdict.relaxed

        torch._dynamo.reset()
        compiled = torch.compile(judge, fullgraph=True, backend="eager")
        got = compiled(one.raw, one.hidden)
        for mine, theirs in zip(got, parts(expected).values(), strict=True):
            assert mine.tolist() == theirs.tolist()
