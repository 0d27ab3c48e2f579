"""Draft, verify, accept and commit each compile as one whole graph, with the results of eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import Engine, Method, Sampling
from decoding.acceptance import Exact, Fly, Lantern, LanternResidual, LVSpec, RandomRelaxation, Rejection, Typical
from decoding.contexts import Full, TextOnly
from decoding.contracts import Acceptance, StepNoise, TreePolicy, VerificationOutput
from decoding.drafters import ModelDrafter
from decoding.drafters.ensemble import Ensemble, EnsembleOptions
from decoding.drafters.merge import SingleLane
from decoding.sampling import process_logits
from decoding.step import grow_tree
from decoding.trees import Chain, DynamicTree, SageTree, StaticTree, branching_paths
from tests import toys
from tests.conformance import checks
from tests.conformance.relaxation import NEIGHBOURS

pytestmark = pytest.mark.slow

SAMPLING = Sampling(max_new_tokens=24, temperature=0.8, top_k=12, ignore_eos=True)
METHODS: dict[str, tuple[bool, Callable[[], TreePolicy], Callable[[], Acceptance]]] = {
    "chain": (False, lambda: Chain(3), Exact),
    "tree+rejection": (False, lambda: StaticTree(branching_paths([2, 2])), Rejection),
    "tabed": (True, lambda: Chain(3), Fly),
    "sage+lvspec": (False, SageTree, LVSpec),
    "typical": (False, lambda: Chain(3), Typical),
    "random": (False, lambda: Chain(3), lambda: RandomRelaxation(0.5)),
    "dynamic": (False, lambda: DynamicTree(3, 2, 8), Exact),
    "dynamic+lantern": (False, lambda: DynamicTree(3, 2, 8), lambda: Lantern(NEIGHBOURS, 20, 0.3)),
    "tree+lantern++": (
        False,
        lambda: StaticTree(branching_paths([2, 2])),
        lambda: LanternResidual(NEIGHBOURS, 10, 5.0, "multiplicative", residual="code"),
    ),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles to one graph or raises; the backend runs the traced graph."""
    return torch.compile(function, fullgraph=True, dynamic=False, backend="eager")


def started(name: str) -> Engine:
    """An engine with three samples after a few steps."""
    ensemble, tree, rule = METHODS[name]
    contexts = [Full(), TextOnly()] if ensemble else [Full()]
    merge = Ensemble(EnsembleOptions("matches", steps=4)) if ensemble else SingleLane()
    drafter = ModelDrafter(toys.perturbed("llava", 0.02), contexts, toys.VOCAB_SIZE, merge)
    engine = Engine(toys.target("llava"), Method(drafter, tree(), rule()), 3, 128)
    for request in checks.requests("llava", 5, SAMPLING)[2:]:
        engine.submit(request)
    engine.step()
    assert len(engine._slots.active) == 3
    return engine


# Tracing takes seconds: two cases cover most of the code, and `make test-product` runs all.
ALWAYS = ("tabed", "sage+lvspec")


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.full) for name in METHODS]
)
@torch.inference_mode()
def test_each_part_of_a_step_is_one_graph(name: str) -> None:
    eager, traced = started(name), started(name)
    outputs = []
    for engine, wrap in ((eager, lambda f: f), (traced, compiled)):
        table, method = engine._slots, engine.method
        slots = table.batch(table.active)
        rows = table.sampling(slots)
        levels = min(3, method.tree.max_levels)

        def draft(
            engine: Engine = engine, slots: Any = slots, rows: Any = rows, levels: int = levels
        ) -> tuple[Any, Any]:
            noise = StepNoise(engine._slots.noise(slots), levels + 1, toys.VOCAB_SIZE)
            root, max_depth = engine._slots.root[slots.index], engine._slots.max_depth(slots)
            tree = grow_tree(engine.method, slots, root, levels, rows, noise, max_depth)
            return tree.within(max_depth), noise

        def verify(tree: Any, engine: Engine = engine, slots: Any = slots) -> Tensor:
            return engine._lanes.forward(slots, tree.tokens, tree.depth, tree.visible())

        def accept(
            tree: Any, hidden: Tensor, noise: Any, engine: Engine = engine, slots: Any = slots, rows: Any = rows
        ) -> tuple[Any, Any]:
            target_logits = engine._lanes.logits(hidden)[:, 0]
            verification = VerificationOutput(
                slots, tree, target_logits, process_logits(target_logits, rows, None), hidden, hidden, noise, rows
            )
            return verification, engine.method.acceptance.accept(verification)

        def commit(verification: Any, result: Any, engine: Engine = engine, slots: Any = slots) -> Any:
            engine._lanes.commit(slots, result.path, result.n)
            engine.method.drafter.commit(verification, result)
            return engine.method.tree.commit(verification, result)

        tree, noise = wrap(draft)()
        hidden = wrap(verify)(tree)
        verification, result = wrap(accept)(tree, hidden, noise)
        wrap(commit)(verification, result)
        outputs.append((tree.tokens, tree.valid, result.path, result.n, result.next, engine._lanes.cache.lens))
    for mine, theirs in zip(*outputs, strict=True):
        assert torch.equal(mine, theirs)
