"""Tests losslessness for models with windows, chunks, image blocks, prefixes, score caps and attention sinks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models.forward_check as check
import models.kv.lanes as lanes
import models.kv.prefill as reading
from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from models.backends import attention, mask_rules
from models.backends.base import REFERENCE
from models.backends.cache import RaggedCache
from models.backends.cuda.backend import CudaBackend
from models.backends.mask_rules import LayerRule, TreePositions, rules_of
from models.heads.training.teacher import make_training_sample
from models.loading.checkpoints import CheckpointError
from models.loading.output_layer import OutputLayer
from tests import toys
from tests.conformance import checks, masked
from tests.covering import tiers
from tests.models.plain_tree_kernel import plain
from tests.toys.masked import CHUNK, NARROW, WINDOW

FAMILIES = tuple(toys.MASKED)
METHODS = [("chain", "none"), ("chain", "perturbed"), ("ragged", "perturbed"), ("chain", "right")]

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@tiers("family, tree, drafter, slots", FAMILIES, METHODS, [1, 4, 9], fast=("mistral",))
def test_greedy_output_equals_generate(family: str, tree: str, drafter: str, slots: int) -> None:
    masked.check_greedy(family, tree, drafter, slots)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_accepted_and_rejected_at_several_depths(family: str) -> None:
    """A windowed model whose drafts were all rejected would never read a tree's own positions."""
    recorder = masked.check_greedy(family, "ragged", "perturbed", 9, count=14)
    assert len(recorder.rejected_at) >= 3
    assert max(recorder.ranks_taken) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gemma4", "cohere2", "llama4_text"])
def test_sampled_output_equals_the_reference(family: str) -> None:
    """The scale and the cap of logits change probabilities, though not the best token."""
    check_sampled(family)


def check_sampled(family: str, change: Callable[[Any], None] = lambda target: None) -> None:
    target = toys.target(family)
    change(target)
    sampling = Sampling(max_new_tokens=masked.NUM_NEW, temperature=1.0, suppress_tokens=(3, 4, 5, 6, 7, 8))
    wanted = masked.requests(family, 6, sampling)
    method = Method(checks.make_drafter("perturbed", family), checks.TREES["chain"](), Exact())
    done = checks.run(Engine(target, method, 3, masked.CAPACITY), wanted)
    for request in wanted:
        expected = checks.referenced(family, request, target.eos_ids)
        assert done[request.sample_id].token_ids == expected, request.sample_id


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["mistral_narrow", "gemma2", "gemma3", "gemma4", "llama4_text", "gpt_oss", "gemma4_e2b"]
)
def test_the_tree_kernel_gives_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA backend over CPU tensors, with a plain tree kernel that reads rows by number."""
    backend = CudaBackend()
    for name in ("copy_to_host", "copy_to_device", "step_recorder"):
        monkeypatch.setattr(backend, name, getattr(REFERENCE, name))
    monkeypatch.setattr("models.backends.cuda.backend.kernel_for", lambda *_: plain)
    monkeypatch.setattr("models.kv.lanes.backend_for", lambda _: backend)
    masked.check_greedy(family, "ragged", "perturbed", 4)


@pytest.mark.slow
def test_layers_of_a_decoder_with_several_types_keep_their_types_without_the_others() -> None:
    """A decoder of only some layers equals a model that was made of these layers: rotary embeddings differ by type."""
    whole = toys.target("gemma3_text")
    config = copy.deepcopy(toys.oracle("gemma3_text").config)
    config.num_hidden_layers, config.layer_types = 2, [config.layer_types[index] for index in (1, 3)]
    alone: Any = type(toys.oracle("gemma3_text"))(config).eval()
    alone.load_state_dict(toys.oracle("gemma3_text").state_dict(), strict=False)
    layers: Any = whole.decoder.layers
    alone.model.layers = nn.ModuleList(copy.deepcopy(layers[index]) for index in (1, 3))
    for index, layer in enumerate(alone.model.layers):
        layer.self_attn.layer_idx, layer.self_attn.config = index, config
    ids = torch.tensor([[9, 30, 4, 17, 21, 40, 11, 9, 12]])
    with torch.inference_mode():
        expected = alone.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        memory = whole.lanes(1, 1, 32)
        memory.admit(_slots(1), [[whole.encode("<s>", ())]])
        memory.empty(_slots(1))
        depth = torch.arange(ids.shape[1])[None]
        some = memory.of_layers([1, 3])
        got = memory.forward(_slots(1), ids, depth, depth[:, :, None] >= depth[:, None], 0, some)[0, 0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_layers_that_share_keys_and_values_are_not_skipped() -> None:
    with pytest.raises(ValueError, match="cannot be skipped"):
        toys.target("gemma4_e2b").lanes(1, 1, 32).of_layers([0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "phimoe"])
def test_compiled_layers_with_a_window_give_the_same_tokens(family: str) -> None:
    target = toys.target(family)
    assert target.compile()
    method = Method(checks.make_drafter("perturbed", family), checks.TREES["ragged"](), Exact())
    wanted = masked.requests(family, 9)
    done = checks.run(Engine(target, method, 4, masked.CAPACITY), wanted)
    masked.compare(family, wanted, {name: one.token_ids for name, one in done.items()}, target.eos_ids)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3", "paligemma"])
def test_the_kv_cache_of_a_prompt_does_not_depend_on_other_prompts(family: str) -> None:
    """Prompts of different lengths and blocks are prefilled together, and equal those that are prefilled alone."""
    target = toys.target(family)
    prompts = [target.encode(*masked.prompt(family, number)) for number in range(6)]
    together = target.lanes(6, 1, masked.CAPACITY)
    with torch.inference_mode():
        states = together.admit(_slots(6), [[prompt] for prompt in prompts]).states
        for prompt, expected in zip(prompts, states, strict=True):
            alone = target.lanes(1, 1, masked.CAPACITY)
            [got] = alone.admit(_slots(1), [[prompt]]).states
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def _slots(number: int) -> Any:
    return lanes.SlotBatch(torch.arange(number), tuple(range(number)), (1,) * number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "texts", "num_stems"),
    [
        ("mistral", ["{} w9 w10 w11", "{} w12", "{} w13 w14"], 1),
        ("gemma3", ["{} <boi> w9 w10 w11", "{} <boi> w12", "{} <boi> w13 w14"], 1),
        ("gemma4_small", ["{} <image> w9 w10 w11", "{} <image> w12", "{} <image> w13 w14"], 1),
        ("gemma3", ["{} w9 <boi> w10", "{} w11 <boi> w10", "{} w11 w12 <boi> w13"], 0),
        ("paligemma", ["<image> {} w9", "<image> {} w10", "<image> {} w11 w12"], 0),
    ],
)
def test_stems_end_behind_blocks(
    family: str, texts: list[str], num_stems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts share the tokens before their first difference if no block reaches beyond them."""
    target = toys.target(family)
    monkeypatch.setattr("models.kv.prefill_batching.MIN_SAVING", 1)
    found: list[int] = []
    find = reading.find_stems

    def counted(*given: Any) -> Any:
        stems = find(*given)
        found.append(len(stems))
        return stems

    monkeypatch.setattr(reading, "find_stems", counted)
    common = " ".join(["<s>", *(f"w{20 + i}" for i in range(15))])
    images = (toys.picture(3, family),) if toys.family_of(family).takes_images else ()
    sampling = Sampling(max_new_tokens=masked.NUM_NEW, suppress_tokens=(3, 4, 5, 6, 7, 8))
    wanted = [Request(f"stem-{i}", text.format(common), images, sampling, seed=1) for i, text in enumerate(texts)]
    method = Method(checks.make_drafter("none", family), checks.TREES["chain"](), Exact())
    done = checks.run(Engine(target, method, 3, masked.CAPACITY), wanted)
    masked.compare(family, wanted, {name: one.token_ids for name, one in done.items()}, target.eos_ids)
    assert found == [num_stems]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gemma4_small", "paligemma", "llama4_text"])
def test_states_of_a_training_sample_are_those_of_decoding(family: str) -> None:
    """A prompt with its continuation in one prefill has the logits of `generate`: no generated token joins a block."""
    target = toys.target(family)
    for request in masked.requests(family, 4):
        expected = checks.generated(family, request, target.eos_ids)
        sample = make_training_sample(target, target.encode(request.prompt, request.images), expected)
        memory = target.lanes(1, 1, masked.CAPACITY)
        with torch.inference_mode():
            [states] = memory.admit(_slots(1), [[sample.prefix]]).states
            scores = memory.logits(states)[-len(expected) - 1 : -1].clone()
            scores[:, list(request.sampling.suppress_tokens)] = -torch.inf
        assert tuple(scores.argmax(-1).tolist()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_rules_are_those_of_the_family(family: str) -> None:
    rules = rules_of(toys.target(family).decoder)
    sizes = [(rule.window, rule.chunk) for rule in rules]
    both = [(WINDOW, None), (None, None)]
    expected = {
        **{"mistral": both[:1] * 2, "phimoe": both[:1] * 2, "mistral_narrow": [(NARROW, None)] * 2, "gpt_oss": both},
        **{"paligemma": both[1:] * 2, "llama4_text": [(None, CHUNK)] * 3 + both[1:]},
        **{name: [both[0], *both, *both] for name in ("gemma4_e2b", "gemma4_small")},
    }
    assert sizes == expected.get(family, both * 2)
    blocks = {"gemma3": [True] * 4, "gemma4": [True, False] * 2, "paligemma": [True] * 2}
    blocks["gemma4_small"] = [True, True, False, True, False]
    assert [rule.in_blocks for rule in rules] == blocks.get(family, [False] * len(rules))
    assert all(rule.has_softcap == (family == "gemma2") for rule in rules)
    assert all(rule.has_sinks == (family == "gpt_oss") for rule in rules)
    is_shared = family in ("gemma4_e2b", "gemma4_small")
    assert [rule.owner for rule in rules[-2:]] == ([1, 2] if is_shared else [None, None])


# --- planted faults ------------------------------------------------------------------------------------------------


def the_window_is_one_longer(patch: pytest.MonkeyPatch) -> None:
    _replace_reads(patch, lambda rule: replace(rule, window=rule.window and rule.window + 1))


def the_window_is_one_shorter(patch: pytest.MonkeyPatch) -> None:
    _replace_reads(patch, lambda rule: replace(rule, window=rule.window and rule.window - 1))


def chunks_begin_one_token_later(patch: pytest.MonkeyPatch) -> None:
    reads = LayerRule.reads

    def moved(self: LayerRule, queries: Tensor, keys: Tensor) -> Tensor:
        return reads(self, queries + (self.chunk or 1) - 1, keys + (self.chunk or 1) - 1)

    patch.setattr(LayerRule, "reads", moved)
    patch.setattr(LayerRule, "first_number", lambda self, query: 0)


def a_window_does_not_cut_inside_a_block(patch: pytest.MonkeyPatch) -> None:
    make = LayerRule.prompt_mask

    def uncut(self: LayerRule, queries: Tensor, keys: Tensor, groups: Tensor | None = None) -> Tensor:
        mask = make(self, queries, keys, groups)
        if groups is None:
            return mask
        same = groups[:, queries, None] == groups[:, None, keys]
        return mask | same.view(-1, 1, *same.shape[-2:])

    patch.setattr(LayerRule, "prompt_mask", uncut)
    patch.setattr(LayerRule, "first_number", lambda self, query: 0)


def image_tokens_are_causal(patch: pytest.MonkeyPatch) -> None:
    _replace_rules(patch, lambda rule: replace(rule, in_blocks=False))


def all_layers_read_blocks(patch: pytest.MonkeyPatch) -> None:
    _replace_rules(patch, lambda rule: replace(rule, in_blocks=True))


def blocks_go_to_another_row(patch: pytest.MonkeyPatch) -> None:
    stack = reading.stack_groups
    patch.setattr(reading, "stack_groups", lambda prefixes: stack(prefixes[::-1]))


def positions_of_nodes_are_their_numbers(patch: pytest.MonkeyPatch) -> None:
    """Siblings have equal positions, and not one after the other."""

    def numbered(cls: Any, lens: Tensor, depth: Tensor, visible: Tensor) -> TreePositions:
        scratch = lens[:, None] + torch.arange(visible.shape[2])
        return TreePositions(lens[:, None] + depth, scratch[:, None].expand_as(visible))

    patch.setattr(TreePositions, "of", classmethod(numbered))


def windows_apply_to_prompts_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("models.backends.base.masked_rules", lambda rules: [])


def the_wrong_layer_owns_keys_and_values(patch: pytest.MonkeyPatch) -> None:
    _replace_rules(patch, lambda rule: replace(rule, owner=0) if rule.owner == 1 else rule)


def inputs_of_layers_go_to_another_token(patch: pytest.MonkeyPatch) -> None:
    look_up = lanes.layer_inputs_of
    patch.setattr(lanes, "layer_inputs_of", lambda decoder, tokens: look_up(decoder, (tokens + 1) % toys.VOCAB_SIZE))


def scores_are_not_capped(patch: pytest.MonkeyPatch) -> None:
    _without(patch, "softcap")


def sinks_are_dropped(patch: pytest.MonkeyPatch) -> None:
    _without(patch, "sinks")


def _without(patch: pytest.MonkeyPatch, name: str) -> None:
    for function in ("weigh", "attend_prompt"):
        true = getattr(attention, function)

        def run(*given: Any, true: Any = true) -> Tensor:
            softcap, sinks = given[-2:]
            return true(*given[:-2], None if name == "softcap" else softcap, None if name == "sinks" else sinks)

        patch.setattr(attention, function, run)


def _replace_reads(patch: pytest.MonkeyPatch, change: Callable[[LayerRule], LayerRule]) -> None:
    reads = LayerRule.reads
    patch.setattr(LayerRule, "reads", lambda self, queries, keys: reads(change(self), queries, keys))
    patch.setattr(LayerRule, "first_number", lambda self, query: 0)


def _replace_rules(patch: pytest.MonkeyPatch, change: Callable[[LayerRule], LayerRule]) -> None:
    rule_of = RaggedCache.rule_of
    patch.setattr(RaggedCache, "rule_of", lambda self, layer: change(rule_of(self, layer)))


FAULTS = [
    (the_window_is_one_longer, "mistral"),
    (the_window_is_one_longer, "gemma3"),
    (the_window_is_one_shorter, "gemma2"),
    (chunks_begin_one_token_later, "llama4_text"),
    (a_window_does_not_cut_inside_a_block, "gemma3"),
    (image_tokens_are_causal, "gemma3"),
    (image_tokens_are_causal, "gemma4"),
    (image_tokens_are_causal, "paligemma"),
    (all_layers_read_blocks, "gemma4"),
    (blocks_go_to_another_row, "gemma3"),
    (positions_of_nodes_are_their_numbers, "mistral_narrow"),
    (positions_of_nodes_are_their_numbers, "llama4_text"),
    (the_wrong_layer_owns_keys_and_values, "gemma4_e2b"),
    (inputs_of_layers_go_to_another_token, "gemma4_small"),
    (windows_apply_to_prompts_alone, "phimoe"),
    (scores_are_not_capped, "gemma2"),
    (sinks_are_dropped, "gpt_oss"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "family"), FAULTS, ids=[f"{fault.__name__}-{family}" for fault, family in FAULTS])
def test_a_planted_fault_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The check at load time would refuse the target; here the comparison with `generate` must find the fault.
    target, drafter = toys.target(family), checks.make_drafter("perturbed", family)
    monkeypatch.setattr(toys, "target", lambda _: target)
    monkeypatch.setattr(checks, "make_drafter", lambda *_: drafter)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        masked.check_greedy(family, "ragged", "perturbed", 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "family"), FAULTS[:8], ids=[f"{fault.__name__}-{family}" for fault, family in FAULTS[:8]]
)
def test_the_check_at_load_time_refuses_a_model_that_is_run_by_a_wrong_rule(
    fault: Callable[[pytest.MonkeyPatch], None], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(CheckpointError, match="cannot be run: "):
        toys.target(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gemma4", "cohere2"])
def test_a_dropped_scale_or_cap_of_logits_is_caught(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(target: Any) -> None:
        assert isinstance(target.head, OutputLayer)
        target.head = target.head.rows

    with pytest.raises(AssertionError):
        check_sampled(family, bare)
    monkeypatch.setattr(OutputLayer, "forward", lambda self, hidden: self.rows(hidden))
    with pytest.raises(CheckpointError, match="its logits are not its output embedding over its last states"):
        toys.target(family)


@pytest.mark.slow
def test_a_cap_is_found_though_logits_of_a_test_prompt_are_far_below_it() -> None:
    model = copy.deepcopy(toys.oracle("gemma2"))
    model.config.final_logit_softcapping = 30.0
    head: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
    head.weight.data.mul_(1e-3)
    target = toys.owned(model, "gemma2", "small")
    assert isinstance(target.head, OutputLayer)
    assert target.head.cap == 30.0


@pytest.mark.slow
def test_a_prefix_that_the_check_lengthens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens behind PaliGemma's prompt are of type 1, as in `generate`; with type 0 they would belong to the prefix."""
    extend = check._extend
    monkeypatch.setattr(check, "_extend", lambda inputs, nodes, new_types=0: extend(inputs, nodes, 0))
    with pytest.raises(CheckpointError, match="logits of earlier tokens change with later ones"):
        toys.target("paligemma")


def test_an_unknown_argument_of_attention_is_refused() -> None:
    mask_rules.refuse_unknown({"dropout": 0.0, "position_bias": None})
    with pytest.raises(TypeError, match="does not support: position_bias"):
        mask_rules.refuse_unknown({"position_bias": torch.zeros(1)})
