"""Draft, verify, accept and commit do not synchronise with the device.

Under FakeTensorMode tensors have shapes but no values, so any `.item()`, `.tolist()`, `if tensor:` or data-dependent
shape raises; a step that runs there can be captured and compiled.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

from decoding import Method
from decoding.acceptance import Exact, Fly, Lantern, LanternResidual, LVSpec, RandomRelaxation, Rejection, Typical
from decoding.conformance.host_reads import run_steps
from decoding.contexts import Full
from decoding.contracts import Acceptance, Drafter, PrefillOutput, TreePolicy
from decoding.drafters import (
    BlockDrafter,
    EagleDrafter,
    JacobiDrafter,
    LayerSkipDrafter,
    LookupDrafter,
    MedusaDrafter,
    ModelDrafter,
    NoDrafter,
    ParallelEagleDrafter,
    SuffixDrafter,
)
from decoding.drafters.ensemble import Ensemble, EnsembleOptions, Policy
from decoding.trees import Chain, DynamicTree, OnlineSageTree, SageTree, StaticTree, branching_paths
from models.heads.block import BlockNetwork
from models.heads.eagle import EagleNetwork, EagleShape
from models.heads.eagle3 import Eagle3Network, Eagle3Shape
from models.heads.medusa import MedusaHeads, MedusaShape
from models.heads.vision import MsdNetwork, VispecNetwork
from models.inputs.prefix import Prefix
from models.target import Target
from tests import toys
from tests.conformance import block
from tests.conformance.relaxation import NEIGHBOURS

pytestmark = pytest.mark.slow

Parts = tuple[Callable[[Target, Target], Drafter], Callable[[], TreePolicy], Callable[[], Acceptance]]


def one_model(target: Target, model: Target) -> Drafter:
    return ModelDrafter(model, [Full()], toys.VOCAB_SIZE)


def ensemble(policy: Policy, window: int = 0) -> Callable[[Target, Target], Drafter]:
    options = EnsembleOptions(policy, window=window, steps=4)
    return lambda _, model: ModelDrafter(model, [Full(), Full()], toys.VOCAB_SIZE, Ensemble(options))


def block_drafter(target: Target) -> Drafter:
    return BlockDrafter(BlockNetwork(block.shape()), target.decoder.get_input_embeddings(), target.head)  # type: ignore[operator]


def peagle_drafter(target: Target, _: Target) -> Drafter:
    shape = Eagle3Shape(toys.text_config(), toys.VOCAB_SIZE, target.hidden_size, (0, 1), mask_token_id=6)
    network = Eagle3Network(shape).requires_grad_(False)
    return ParallelEagleDrafter(network, nn.Sequential(network.norm, network.lm_head))


def bush() -> TreePolicy:
    return StaticTree(branching_paths([2, 2, 1]))


METHODS: dict[str, Parts] = {
    "plain": (lambda *_: NoDrafter(), lambda: Chain(1), Exact),
    "chain": (one_model, lambda: Chain(4), Exact),
    "tree": (one_model, bush, Exact),
    "rejection": (one_model, bush, Rejection),
    "tabed": (ensemble("matches"), lambda: Chain(4), Exact),
    "tabed-window": (ensemble("inverse_linear", 4), bush, Exact),
    "tabed-random": (ensemble("random"), bush, Exact),
    "tabed-adaboost": (ensemble("adaboost", 2), bush, Exact),
    "sage": (one_model, SageTree, Exact),
    "sage-online": (one_model, OnlineSageTree, Exact),
    "dynamic": (one_model, lambda: DynamicTree(4, 3, 16), Exact),
    "dynamic-rejection": (one_model, lambda: DynamicTree(4, 3, 16), Rejection),
    "lookup": (lambda *_: LookupDrafter(), bush, Exact),
    "jacobi": (lambda *_: JacobiDrafter(), lambda: Chain(4), Exact),
    "jacobi-above": (lambda *_: JacobiDrafter(grid=3), lambda: Chain(4), Typical),
    "suffix": (lambda *_: SuffixDrafter(), lambda: Chain(4), Exact),
    "lvspec": (one_model, lambda: Chain(5), LVSpec),
    "lvspec-tree": (one_model, lambda: StaticTree([(f, *(0,) * d) for f in (0, 1) for d in range(4)]), LVSpec),
    "lvspec-before": (one_model, lambda: Chain(5), lambda: LVSpec(0.5, 3, True, "before")),
    "fly": (one_model, lambda: Chain(6), Fly),
    "fly-gate": (one_model, lambda: Chain(6), lambda: Fly(0.1, 0)),
    "random": (one_model, bush, lambda: RandomRelaxation(0.5)),
    "typical": (one_model, bush, Typical),
    "lantern": (one_model, lambda: DynamicTree(4, 3, 16), lambda: Lantern(NEIGHBOURS, 20, 0.1)),
    "lantern-jsd": (one_model, bush, lambda: Lantern(NEIGHBOURS, 9, 0.3, "jsd")),
    "lantern-paper": (one_model, bush, lambda: LanternResidual(NEIGHBOURS, 9, 0.3)),
    "lantern++": (one_model, bush, lambda: LanternResidual(NEIGHBOURS, 10, 5.0, "multiplicative", residual="code")),
    "tabed+sage+lvspec": (ensemble("error"), SageTree, LVSpec),
    "layer-skip": (lambda *_: LayerSkipDrafter([0]), lambda: Chain(4), Exact),
    "layer-skip-dynamic": (lambda *_: LayerSkipDrafter([1]), lambda: DynamicTree(4, 3, 5), Exact),
    "block": (lambda target, _: block_drafter(target), lambda: Chain(4), Exact),
    "block-dynamic": (lambda target, _: block_drafter(target), lambda: DynamicTree(4, 3, 16), Exact),
    "eagle": (lambda target, _: EagleDrafter(EagleNetwork(EAGLE), target.head), lambda: DynamicTree(4, 3, 16), Exact),
    "eagle-rejection": (
        lambda target, _: EagleDrafter(EagleNetwork(EAGLE), target.head),
        lambda: DynamicTree(4, 3, 16),
        Rejection,
    ),
    "peagle": (peagle_drafter, bush, Exact),
    "msd": (lambda target, _: EagleDrafter(MsdNetwork(EAGLE), target.head), lambda: DynamicTree(4, 3, 16), Exact),
    "vispec": (lambda target, _: EagleDrafter(VispecNetwork(EAGLE, 3), target.head), bush, Exact),
    "medusa": (lambda *_: MedusaDrafter(MedusaHeads(MedusaShape(4, 1, 32, toys.VOCAB_SIZE))), bush, Exact),
}

EAGLE = EagleShape.of(
    {
        "vocab_size": toys.VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "toy",
)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_step_runs_on_tensors_without_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Loading may look at values; only the step must not.
    monkeypatch.setattr("models.target.check_decoder", lambda _model, _decoder, head, *_: (head, None))
    monkeypatch.setattr("models.target.prove", lambda *_: None)
    # The prefill of this head reads the places of visual tokens; here they are known.
    monkeypatch.setattr("models.heads.vision.visual_runs", lambda _: [(0, 1)])
    make_drafter, make_tree, make_rule = METHODS[name]
    tokenizer = toys.front_end("llama")
    policy, rule = make_tree(), make_rule()
    with FakeTensorMode(), torch.inference_mode():
        target, model = (Target(LlamaForCausalLM(toys.text_config()).eval(), tokenizer) for _ in range(2))
        method = Method(make_drafter(target, model), policy, rule)
        if isinstance(rule, Lantern):
            # A table comes from the disk, with numbers in it.
            rule.neighbourhood.table = torch.zeros(NEIGHBOURS.shape, dtype=torch.long)
        num_lanes = len(getattr(method.drafter, "contexts", [None]))

        def own(prefix: Prefix) -> list[Prefix]:
            return [prefix] * num_lanes if method.drafter.name == "model" else []

        def admitted(prefills: list[PrefillOutput]) -> None:
            if isinstance(rule, LVSpec):
                # Its admission counts visual tokens on the host between steps; here they are known.
                assert prefills[0].hidden is not None
                rule._visual._reserve(2, prefills[0].hidden[0])
                rule._visual._counts = [2, 2, 2]

        result = run_steps(method, target, own, admitted)
        tokens, n = result.output.tokens, result.output.counts
        assert tokens.shape[0] == 3
        assert n.shape == (3,)
        with pytest.raises(Exception, match=r"DataDependent|data-dependent|_local_scalar_dense|aten"):
            n.tolist()
