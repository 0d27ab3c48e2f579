"""Draft, verify, accept and commit do not synchronise with the device.

Under FakeTensorMode tensors have shapes but no values, so any `.item()`, `.tolist()`, `if tensor:` or data-dependent
shape raises; a step that runs there can be captured and compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import LlamaForCausalLM

from decoding import Method, Request, Sampling
from decoding.acceptance import Exact, Fly, Lantern, LanternResidual, LVSpec, RandomRelaxation, Rejection, Typical
from decoding.contexts import Full
from decoding.contracts import Acceptance, Drafter, EngineSpec, PrefillOutput, TreePolicy
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
from decoding.scheduling.slots import RequestState, SlotTable
from decoding.step import run_step
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

COPIES = {torch.tensor, torch.as_tensor, torch.from_numpy}


class NothingFromTheHost(TorchFunctionMode):
    """Refuses tensors built from host numbers, whose copy synchronises."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A scalar is a kernel argument.
        is_kept = bool(args) and isinstance(args[0], (int, float))
        assert func not in COPIES or is_kept, f"{func.__name__}{args} is copied from the host"
        # But not in an assignment, which makes a tensor of it on the host.
        is_number = func is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor)
        assert not is_number, f"{args[2]} is copied from the host; use fill_ or index_put_"
        return func(*args, **(kwargs or {}))


Parts = tuple[Callable[[Target, Target], Drafter], Callable[[], TreePolicy], Callable[[], Acceptance]]
SAMPLING = Sampling(max_new_tokens=20, temperature=0.8, top_k=9, top_p=0.9, repetition_penalty=1.2)
PROCESSED = Sampling(
    max_new_tokens=20, temperature=0.8, min_p=0.1, repetition_penalty=1.2, no_repeat_ngram_size=3,
    bad_words_ids=((5,), (6, 7)), sequence_bias=(((8,), 1.0), ((9, 10, 11), -1.0)), suppress_tokens=(12,),
    begin_suppress_tokens=(13,), min_new_tokens=19, forced_eos_token_id=(2,),
)  # fmt: skip


def one(target: Target, model: Target) -> Drafter:
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
    "chain": (one, lambda: Chain(4), Exact),
    "tree": (one, bush, Exact),
    "rejection": (one, bush, Rejection),
    "tabed": (ensemble("matches"), lambda: Chain(4), Exact),
    "tabed-window": (ensemble("inverse_linear", 4), bush, Exact),
    "tabed-random": (ensemble("random"), bush, Exact),
    "tabed-adaboost": (ensemble("adaboost", 2), bush, Exact),
    "sage": (one, SageTree, Exact),
    "sage-online": (one, OnlineSageTree, Exact),
    "dynamic": (one, lambda: DynamicTree(4, 3, 16), Exact),
    "dynamic-rejection": (one, lambda: DynamicTree(4, 3, 16), Rejection),
    "lookup": (lambda *_: LookupDrafter(), bush, Exact),
    "jacobi": (lambda *_: JacobiDrafter(), lambda: Chain(4), Exact),
    "jacobi-above": (lambda *_: JacobiDrafter(grid=3), lambda: Chain(4), Typical),
    "suffix": (lambda *_: SuffixDrafter(), lambda: Chain(4), Exact),
    "lvspec": (one, lambda: Chain(5), LVSpec),
    "lvspec-tree": (one, lambda: StaticTree([(f, *(0,) * d) for f in (0, 1) for d in range(4)]), LVSpec),
    "lvspec-before": (one, lambda: Chain(5), lambda: LVSpec(0.5, 3, True, "before")),
    "fly": (one, lambda: Chain(6), Fly),
    "fly-gate": (one, lambda: Chain(6), lambda: Fly(0.1, 0)),
    "random": (one, bush, lambda: RandomRelaxation(0.5)),
    "typical": (one, bush, Typical),
    "lantern": (one, lambda: DynamicTree(4, 3, 16), lambda: Lantern(NEIGHBOURS, 20, 0.1)),
    "lantern-jsd": (one, bush, lambda: Lantern(NEIGHBOURS, 9, 0.3, "jsd")),
    "lantern-paper": (one, bush, lambda: LanternResidual(NEIGHBOURS, 9, 0.3)),
    "lantern++": (one, bush, lambda: LanternResidual(NEIGHBOURS, 10, 5.0, "multiplicative", residual="code")),
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


def fake_prefix(target: Target, length: int) -> Prefix:
    ids = torch.arange(4, 4 + length)
    embeds = target.decoder.get_input_embeddings()(ids)  # type: ignore[operator]
    return Prefix(ids, embeds, torch.arange(length), torch.arange(length) < 2)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_step_runs_on_tensors_without_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Loading may look at values; only the step must not.
    for check in ("check_decoder", "prove"):
        monkeypatch.setattr(f"models.target.{check}", lambda *_: None)
    # The prefill of this head reads the places of visual tokens; here they are known.
    monkeypatch.setattr("models.heads.vision.visual_runs", lambda _: [(0, 1)])
    make_drafter, make_tree, make_rule = METHODS[name]
    tokenizer = toys.front_end("llama")
    policy, rule = make_tree(), make_rule()
    with FakeTensorMode(), torch.inference_mode():
        target, model = (Target(LlamaForCausalLM(toys.text_config()).eval(), tokenizer) for _ in range(2))
        method = Method(make_drafter(target, model), policy, rule)
        tree = method.tree
        if isinstance(rule, Lantern):
            # A table comes from the disk, with numbers in it.
            rule.neighbourhood.table = torch.zeros(NEIGHBOURS.shape, dtype=torch.long)
        capacity = 64 + tree.num_scratch(method.drafter.shares_cache)
        lanes = target.lanes(3, 1, capacity, method.drafter.feature_layers)
        spec = EngineSpec(
            3, 64, target.vocab_size, target.hidden_size, target.device, target.eos_ids, target.special_ids,
            tree.max_frontier_nodes, tree.max_grown_nodes, tree.max_levels, max_missed_tokens=64, lanes=lanes,
        )  # fmt: skip
        for part in (method.drafter, tree, method.acceptance):
            part.open(spec)
        table = SlotTable(3, target.vocab_size, target.device)
        lengths = (6, 9, 4)
        progress = [
            RequestState(
                Request(f"s{i}", "", (), PROCESSED if i == 2 else SAMPLING), n, 2, tree.max_levels, token_ids=[5]
            )
            for i, n in enumerate(lengths)
        ]
        prefixes = [fake_prefix(target, n) for n in lengths]
        table.occupy([0, 1, 2], progress, prefixes)
        slots = table.batch([0, 1, 2])
        prefill = lanes.admit(slots, [[prefix] for prefix in prefixes], probe_attention=True)
        prefill_outputs = [
            PrefillOutput(p, prefill.hidden_of(i), None, prefill.features_of(i)) for i, p in enumerate(prefixes)
        ]
        num_lanes = len(getattr(method.drafter, "contexts", [None]))
        own = [[prefix] * num_lanes if method.drafter.name == "model" else [] for prefix in prefixes]
        method.drafter.admit(slots, table.root[slots.index], prefill_outputs)
        method.drafter.prefill(slots, own)
        tree.reset(slots)
        if isinstance(rule, LVSpec):
            # Its admission counts visual tokens on the host between steps; here they are known.
            assert prefill_outputs[0].hidden is not None
            rule._visual._reserve(2, prefill_outputs[0].hidden[0])
            rule._visual._counts = [2, 2, 2]
        rows = table.sampling(slots)
        levels = tree.max_levels if method.drafter.name != "none" else 0
        # Off in between: the host knows the number of missed tokens.
        for number, num_levels in enumerate((levels, 0, 0, 0, levels, levels)):
            # Copies of the first step are cached.
            with NothingFromTheHost() if number else nullcontext():
                result = run_step(method, lanes, table, slots, rows, num_levels)
        tokens, n = result.output.tokens, result.output.counts
        assert tokens.shape[0] == 3
        assert n.shape == (3,)
        with pytest.raises(Exception, match=r"DataDependent|data-dependent|_local_scalar_dense|aten"):
            n.tolist()
