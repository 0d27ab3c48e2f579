"""Draft, grow, verify and commit with heads do not synchronise with the device, and compile to one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.acceptance import Exact, Rejection
from decoding.contracts import Acceptance, Drafter, EngineSpec, Method, PrefillOutput, StepNoise, VerificationOutput
from decoding.drafters import EagleDrafter, MedusaDrafter
from decoding.drafters.merge import SingleLane
from decoding.noise import Noise
from decoding.sampling import RowSampling
from decoding.step import grow_tree
from decoding.trees import DynamicTree
from models.heads.medusa import MedusaHeads, MedusaShape
from models.heads.training.losses import fresh_eagle
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch
from tests import toys
from tests.conformance import vision_heads

NUM_SLOTS, LENGTH, LEVELS = 2, 5, 3
CPU = torch.device("cpu")


def make_drafter(kind: str, num_lanes: int) -> Drafter:
    target = toys.target("llama")
    merge = SingleLane() if num_lanes == 1 else Mean()
    if kind in ("eagle", "vispec"):
        network = fresh_eagle(target, 0).network
        network = vision_heads.vispec(network) if kind == "vispec" else network
        return EagleDrafter(network, target.head, num_lanes, merge)
    torch.manual_seed(0)
    return MedusaDrafter(MedusaHeads(MedusaShape(LEVELS, 1, 32, toys.VOCAB_SIZE)), num_lanes, merge)


def admitted(kind: str, policy: DynamicTree, num_lanes: int = 1) -> tuple[Drafter, SlotBatch]:
    """A drafter that holds two samples with random features."""
    drafter = make_drafter(kind, num_lanes)
    none: frozenset[int] = frozenset()
    drafter.open(
        EngineSpec(
            NUM_SLOTS,
            64,
            toys.VOCAB_SIZE,
            32,
            CPU,
            none,
            none,
            policy.max_frontier_nodes,
            policy.max_grown_nodes,
            policy.max_levels,
        )
    )
    slots = SlotBatch(torch.arange(NUM_SLOTS), tuple(range(NUM_SLOTS)), (1,) * NUM_SLOTS)
    ids = torch.arange(4, 4 + LENGTH)
    is_visual = (ids == ids[1]) | (ids == ids[2]) if kind == "vispec" else ids < 0
    prefix = Prefix(ids, torch.randn(LENGTH, 32), torch.arange(LENGTH), is_visual)
    prefill_output = PrefillOutput(prefix, features=torch.randn(1, LENGTH, 32).expand(num_lanes, -1, -1))
    drafter.admit(slots, torch.full((NUM_SLOTS,), 9), [prefill_output] * NUM_SLOTS)
    return drafter, slots


def one_step(method: Method, slots: SlotBatch, root: Tensor, num_lanes: int = 1) -> Tensor:
    """Draft, grow, accept and commit once against a target that gives zeros."""
    drafter: Any = method.drafter
    b = root.shape[0]
    ones, zeros = torch.ones(b), torch.zeros(b, dtype=torch.long)
    rows = RowSampling(ones, zeros, ones, ones, None, True, 0, False)
    noise = StepNoise(Noise(torch.stack([root, root], 1), root), LEVELS + 1, toys.VOCAB_SIZE)
    tree = grow_tree(method, slots, root, LEVELS, rows, noise, torch.full_like(root, 2))
    logits = torch.zeros(b, tree.num_nodes, toys.VOCAB_SIZE)
    hidden = torch.linspace(-1, 1, tree.num_nodes * 32).view(1, 1, -1, 32).expand(b, num_lanes, -1, -1)
    verification = VerificationOutput(slots, tree, logits, logits, hidden, hidden, noise, rows)
    result = method.acceptance.accept(verification)
    drafter.commit(verification, result)
    state: Tensor = drafter._output if drafter.name == "eagle" else drafter._state
    return state + result.next[:, None, None] + tree.tokens.sum()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule"), [("eagle", Exact), ("vispec", Exact), ("medusa", Rejection)])
def test_a_whole_step_compiles_into_one_graph(kind: str, rule: Callable[[], Acceptance]) -> None:
    policy = DynamicTree(2, LEVELS - 1, 6)
    results = []
    for wrap in (lambda step: step, lambda step: torch.compile(step, fullgraph=True, backend="eager")):
        torch.manual_seed(0)
        with torch.no_grad():
            drafter, slots = admitted(kind, policy)
            method = Method(drafter, policy, rule())
            results.append(wrap(one_step)(method, slots, torch.full((NUM_SLOTS,), 9)).clone())
    torch.testing.assert_close(results[0], results[1])


class Mean(SingleLane):
    """The plain mean of the lanes' logits."""

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        pass

    def merge(self, slots: SlotBatch, logits: Tensor, depth: int) -> Tensor:
        return logits.mean(dim=1)


@pytest.mark.parametrize("kind", ["eagle", "vispec", "medusa"])
def test_two_lanes_with_equal_features_draft_as_one(kind: str) -> None:
    """A target with several lanes (guidance) hands over features per lane; the head keeps a row for each."""
    trees = []
    for num_lanes in (1, 2):
        torch.manual_seed(0)
        policy = DynamicTree(3, LEVELS - 1, 10)
        with torch.no_grad():
            drafter, slots = admitted(kind, policy, num_lanes)
            method = Method(drafter, policy, Exact())
            for _ in range(2):
                trees.append(one_step(method, slots, torch.full((NUM_SLOTS,), 9), num_lanes)[:, :1])
    torch.testing.assert_close(torch.stack(trees[:2]), torch.stack(trees[2:]))
