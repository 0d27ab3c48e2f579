"""Tests models with recurrent layers: gated delta rule, short convolutions, Mamba 2; outputs equal `generate`."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import JambaConfig, JambaForCausalLM

from decoding import Engine, Method, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import LayerSkipDrafter, LookupDrafter, ModelDrafter
from decoding.trees import Chain, DynamicTree, SageTree, StaticTree, branching_paths
from models.backends.states.layers import recurrent_layers
from models.kv.lanes import LaneModel, SlotBatch
from models.loading.checkpoints import CheckpointError
from models.target import Target
from tests import toys
from tests.conformance import checks, recurrent, sharing
from tests.conformance.catch_up import LONG, MIXED
from tests.conformance.methods import METHODS
from tests.conformance.recurrent import FAMILIES, KINDS, VISUAL
from tests.covering import tiers
from tests.toys.text import SIZES

DRAFTERS = ("none", "perturbed", "wrong", "right")
METHOD_NAMES = ("plain", "sd-chain", "lookup", "suffix", "jacobi")
slow = pytest.mark.slow


@tiers("family, drafter, slots", FAMILIES, DRAFTERS, (1, 4, 9), fast=KINDS)
def test_greedy_output_equals_generate(family: str, drafter: str, slots: int) -> None:
    checks.check_greedy(family, "chain", drafter, slots)


@tiers("name, family, slots, mode", METHOD_NAMES, FAMILIES, (1, 4, 9), ("greedy", "sampled"), fast=())
def test_methods_that_verify_chains_equal_the_oracle(name: str, family: str, slots: int, mode: str) -> None:
    recurrent.check_method(name, family, slots, mode)


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_end_at_every_place_of_a_chain(family: str) -> None:
    checks.check_eos_at_every_depth(family, "chain")


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_that_are_all_wrong_change_nothing(family: str) -> None:
    recurrent.check_wrong_drafts(family)


@slow
@pytest.mark.parametrize("name", ["plain", "sd-chain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_may_be_longer_and_shorter_than_chunks(family: str, name: str) -> None:
    recurrent.check_long(family, name)


@slow
@pytest.mark.parametrize("pattern", [LONG, MIXED], ids=["long", "mixed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_catches_up_on_tokens_that_it_missed(family: str, pattern: list[int]) -> None:
    recurrent.check_pauses(family, pattern)


@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in KINDS else slow) for name in FAMILIES])
def test_states_after_every_step_are_those_of_a_fresh_prefill(family: str) -> None:
    recurrent.check_states(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_does_not_change_states(family: str) -> None:
    recurrent.check_ragged_prefill(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_emptied_slot_has_no_state(family: str) -> None:
    recurrent.check_emptied_slot(family)


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_prompts_and_stems_share_states(family: str) -> None:
    assert sharing.check_equal_prompts("sd-chain", family, 9) == sharing.NUM_PROMPTS
    assert sharing.check_questions("sd-chain", family, 9).behind == 9
    assert sharing.check_questions("plain", family, 4).behind >= 4


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_do_not_depend_on_batch_order_or_slot(family: str) -> None:
    checks.check_independence(family, "chain", Sampling(temperature=0.9, top_k=20))


@slow
@pytest.mark.parametrize("name", ["sd-text", "pruned-compact", "tabed"])
@pytest.mark.parametrize("family", VISUAL)
def test_drafters_with_other_contexts_have_states_of_their_own(family: str, name: str) -> None:
    recurrent.check_method(name, family, 4, "greedy")


@slow
@pytest.mark.parametrize(("target", "drafter"), [("qwen3_next", "llama"), ("llama", "qwen3_next"), ("bamba", "lfm2")])
def test_only_one_of_a_pair_may_have_recurrent_layers(target: str, drafter: str) -> None:
    method = Method(ModelDrafter(toys.target(drafter), [Full()], toys.VOCAB_SIZE), Chain(4), Exact())
    recurrent.check_requests(target, method, 4, checks.requests(target, 9))


@slow
@pytest.mark.parametrize("family", KINDS)
def test_engines_and_generate_run_at_once_in_threads(family: str) -> None:
    wanted = checks.requests(family, 6)
    expected = {request.sample_id: checks.generated(family, request, frozenset([2])) for request in wanted}
    results: list[Any] = []

    def decode() -> None:
        engine = Engine(toys.target(family), METHODS["sd-chain"][0](family), 3, 128)
        results.append({key: done.token_ids for key, done in checks.run(engine, wanted).items()})

    def generate() -> None:
        model: Any = copy.deepcopy(toys.oracle(family))
        outputs = {}
        for request in wanted:
            inputs = toys.front_end(family).encode(request.prompt, request.images, request.videos)
            out = model.generate(**inputs, **checks.generate_options(request.sampling), eos_token_id=[2])
            outputs[request.sample_id] = tuple(out[0, inputs["input_ids"].shape[1] :].tolist())
        results.append(outputs)

    threads = [threading.Thread(target=run) for run in (decode, generate, decode)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 3


TREES = {
    "branching": lambda: StaticTree(branching_paths([2, 1])),
    "dynamic": lambda: DynamicTree(4, 2, 12),
    "sage": SageTree,
}


@pytest.mark.parametrize("tree", list(TREES))
def test_trees_are_refused(tree: str) -> None:
    target = toys.target("lfm2")
    with pytest.raises(ValueError, match="has recurrent layers, whose states follow one path"):
        Engine(target, Method(LookupDrafter(), TREES[tree](), Exact()), 2, 64)
    drafter = ModelDrafter(toys.target("lfm2"), [Full()], toys.VOCAB_SIZE)
    with pytest.raises(ValueError, match="lfm2 has recurrent layers"):
        Engine(toys.target("llama"), Method(drafter, TREES[tree](), Exact()), 2, 64)


def test_a_static_tree_with_one_path_is_a_chain() -> None:
    method = Method(checks.make_drafter("perturbed", "lfm2"), StaticTree([(0,), (0, 0), (0, 0, 0)]), Exact())
    recurrent.check_requests("lfm2", method, 4, checks.requests("lfm2", 6))


def test_drafting_with_some_of_the_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="does not draft with a part of its layers"):
        Engine(toys.target("lfm2"), Method(LayerSkipDrafter([0]), Chain(2), Exact()), 2, 64)


def test_models_without_recurrent_layers_have_no_states() -> None:
    target = toys.target("llama")
    assert recurrent_layers(target.decoder) == {}
    assert target.lanes(1, 1, 8).cache.states is None


def test_layers_of_unknown_rules_are_refused_by_their_type() -> None:
    experts = {"num_experts": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}
    config = JambaConfig(vocab_size=toys.VOCAB_SIZE, use_mamba_kernels=False, **SIZES, **experts, **layers)
    model = JambaForCausalLM(config).eval()
    assert recurrent_layers(model.model) == {}
    with pytest.raises(CheckpointError, match=r"it has layers of type (linear_attention|mamba)"):
        Target(model, toys.front_end("llama"), "jamba")


@torch.inference_mode()
@pytest.mark.parametrize("family", KINDS)
def test_tokens_without_weight_leave_states_unchanged_bit_by_bit(family: str) -> None:
    target = toys.target(family)
    lanes = LaneModel(target.decoder, target.head, 2, 1, 64)
    slots, depth = SlotBatch(torch.arange(2), (0, 1), (1, 1)), torch.arange(4).expand(2, -1)
    lanes.admit(slots, [[target.encode(f"w{9 + i} w12 w30", ())] for i in range(2)])
    states = lanes.cache.states
    assert states is not None
    before = [layer.state.clone() for layer in states.layers.values() if layer.state is not None]
    for count in (0, 0, 3):
        lanes.forward(slots, depth + 9, depth, depth[:, :, None] >= depth[:, None])
        lanes.commit(slots, depth[:, :0], torch.tensor([count, 0]))
    lanes.forward(slots, depth + 9, depth, depth[:, :, None] >= depth[:, None])
    after = [layer.state for layer in states.layers.values() if layer.state is not None]
    for old, new in zip(before, after, strict=True):
        assert new is not None
        assert torch.equal(old[1], new[1])
        assert not torch.equal(old[0], new[0])
