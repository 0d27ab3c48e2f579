"""Captured steps with fused layers equal eager ones; a CPU traces the shared layer, and one test compiles it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu.models import RunAgain
from decoding import Engine, Method
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import LayerSkipDrafter, ModelDrafter
from decoding.trees import StaticTree, branching_paths
from models.backends.base import REFERENCE
from models.backends.cuda import fused_layers, graphs, merged_weights
from models.backends.cuda.backend import CudaBackend
from models.backends.cuda.fused_layers import INDUCTOR, fuse
from models.backends.cuda.graphs import CapturedDecoder
from models.backends.layers import template_of
from models.kv.lanes import LaneModel
from models.target import Target
from tests import toys
from tests.conformance import checks
from tests.models.plain_tree_kernel import plain

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.slow,
]


def captured(model: Target, compiler: str) -> CapturedDecoder:
    run = CapturedDecoder(model.decoder, RunAgain(), True, compiler)
    model.lanes = functools.partial(_lanes, model, run)  # type: ignore[method-assign]
    return run


def _lanes(
    model: Target,
    run: CapturedDecoder,
    slots: int,
    lanes: int,
    capacity: int,
    features: Any = (),
    num_pages: Any = None,
) -> LaneModel:
    return LaneModel(model.decoder, model.head, slots, lanes, capacity, run, features, num_pages)


def decode(family: str, compiler: str | None) -> dict[str, Any]:
    """Tokens and acceptances of a pair with a tree, for more requests than slots."""
    target, drafter = toys.target(family), toys.perturbed(family, 0.02)
    runs = [] if compiler is None else [captured(model, compiler) for model in (target, drafter)]
    method = Method(ModelDrafter(drafter, [Full()], toys.VOCAB_SIZE), StaticTree(branching_paths([2, 2])), Exact())
    done = checks.run(Engine(target, method, 3, 128), checks.requests(family, 9))
    for run in runs:
        assert run.num_recordings > 0
        assert run.mode == "captured, fused"
    torch._dynamo.reset()
    return {key: (completion.token_ids, completion.telemetry.acceptance_histogram) for key, completion in done.items()}


@pytest.fixture(params=["mask", "tree kernel"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention under one mask, or with a plain tree kernel."""
    if request.param == "tree kernel":
        backend = CudaBackend()
        for name in ("copy_to_host", "copy_to_device", "step_recorder"):
            monkeypatch.setattr(backend, name, getattr(REFERENCE, name))
        monkeypatch.setattr("models.backends.cuda.backend.kernel_for", lambda *_: plain)
        monkeypatch.setattr("models.kv.lanes.backend_for", lambda _: backend)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3"])
def test_fused_layers_give_the_output_of_the_layers(family: str, attention: None) -> None:
    assert decode(family, "eager") == decode(family, None)


@pytest.mark.parametrize("attention", ["tree kernel"], indirect=True)
def test_compiled_layers_give_the_output_of_the_layers(attention: None) -> None:
    assert decode("llava", INDUCTOR) == decode("llava", None)


@pytest.mark.parametrize("least", [1, 100_000])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_prefills_of_many_tokens_run_fused_layers(family: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_layer, sizes = fused_layers.FusedLayers.run_layer, set()

    def watched(self: Any, index: int, hidden: Any, step: Any, given: Any) -> Any:
        sizes.update([tuple(hidden.shape[:2])] if step.is_prefill else [])
        return run_layer(self, index, hidden, step, given)

    monkeypatch.setattr(graphs, "MIN_FUSED_TOKENS", least)
    monkeypatch.setattr(fused_layers.FusedLayers, "run_layer", watched)
    assert decode(family, "eager") == decode(family, None)
    assert (len(sizes) > 1) == (least == 1)


def test_wrongly_merged_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: keys before queries."""
    merge_layer = merged_weights.merge_layer

    def wrong(layer: nn.Module) -> Any:
        weights = dict(merge_layer(layer))
        for name, whole in weights.items():
            if name.endswith("qkv_proj.weight"):
                weights[name] = whole.roll(8, 0)
        return weights

    monkeypatch.setattr(fused_layers, "merge_layer", wrong)
    assert decode("qwen2_5_vl", "eager") != decode("qwen2_5_vl", None)


def test_merged_weights_are_stored_once_and_the_layers_keep_theirs() -> None:
    target = toys.target("qwen2_5_vl")
    before = {name: parameter.clone() for name, parameter in target.decoder.named_parameters()}
    layer: Any = target.decoder.layers[0]  # type: ignore[index]
    weights = merged_weights.merge_layer(layer)
    for name, parameter in target.decoder.named_parameters():
        assert torch.equal(parameter, before[name])
    for whole, part in (("qkv_proj", "v_proj"), ("gate_up_proj", "up_proj")):
        (path,) = [name for name in weights if name.endswith(f"{whole}.weight")]
        own = layer.get_parameter(path.replace(whole, part))
        assert own.untyped_storage().data_ptr() == weights[path].untyped_storage().data_ptr()
        assert torch.equal(weights[path][-len(own) :], own)
    assert not any("q_proj" in name for name in weights)


def test_parts_of_merged_layers_compute_what_the_layers_do() -> None:
    layer: Any = copy.deepcopy(toys.target("qwen2_5_vl").decoder.layers[0])  # type: ignore[index]
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    template: Any = template_of([layer])
    merged_weights.merge_template(template)
    template.to_empty(device="cpu").load_state_dict(dict(merged_weights.merge_layer(layer)))
    states = torch.randn(3, layer.self_attn.q_proj.in_features, generator=torch.Generator().manual_seed(1))
    assert layer.self_attn.k_proj.bias.abs().min() > 0
    for path in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        expected = layer.get_submodule(path)(states)
        torch.testing.assert_close(template.get_submodule(path)(states), expected, rtol=1e-6, atol=1e-6)


def test_layers_that_are_not_plain_are_not_merged() -> None:
    class Adapted(nn.Linear):
        pass

    for change in ("kind", "hook", "dtype", "bias"):
        layer: Any = copy.deepcopy(toys.target("llava").decoder.layers[0])  # type: ignore[index]
        attention = layer.self_attn
        old = attention.k_proj
        if change == "kind":
            attention.k_proj = Adapted(old.in_features, old.out_features, bias=False)
        elif change == "hook":
            old.register_forward_hook(lambda *_: None)
        elif change == "dtype":
            old.to(torch.bfloat16)
        else:
            attention.k_proj = nn.Linear(old.in_features, old.out_features)
        weights = merged_weights.merge_layer(layer)
        assert "self_attn.k_proj.weight" in weights
        assert "mlp.gate_up_proj.weight" in weights


def test_linear_layers_of_equal_inputs_are_computed_once() -> None:
    def run(states: Any, weight: Any, other: Any) -> Any:
        return F.linear(states, weight)[..., :1] + F.linear(states, weight)[..., 1:] + F.linear(states, other)[..., :1]

    graph = merged_weights.drop_repeated(torch.fx.symbolic_trace(run))
    assert sum(node.target is F.linear for node in graph.graph.nodes) == 2
    states, weight, other = (torch.randn(2, 3) for _ in range(3))
    assert torch.equal(graph(states, weight, other), run(states, weight, other))


def test_some_of_the_layers_are_fused_on_their_own() -> None:
    results = []
    for is_fused in (False, True):
        target = toys.target("llava")
        if is_fused:
            captured(target, "eager")
        drafter = LayerSkipDrafter([1])
        engine = Engine(target, Method(drafter, StaticTree(branching_paths([2, 2])), Exact()), 3, 128)
        done = checks.run(engine, checks.requests("llava", 9))
        results.append(
            {key: (completion.token_ids, completion.telemetry.acceptance_histogram) for key, completion in done.items()}
        )
    assert results[0] == results[1]
    assert isinstance(drafter._runner, CapturedDecoder)
    assert drafter._runner.is_compiled
    torch._dynamo.reset()


@pytest.mark.parametrize("fault", ["index", "columns"])
def test_a_wrong_layer_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted faults: every layer has the first one's weights; keys and values are written one position late."""
    run_layer = fused_layers.FusedLayers.run_layer

    def wrong(self: Any, index: int, hidden: Any, step: Any, given: Any) -> Any:
        if fault == "index":
            self._weights[index] = self._weights[0]
            return run_layer(self, index, hidden, step, given)
        late = step.columns.add(1).clamp_max(step.cache.capacity)
        object.__setattr__(step, "index", (step.index[0], late))
        return run_layer(self, index, hidden, step, given)

    monkeypatch.setattr(fused_layers.FusedLayers, "run_layer", wrong)
    assert decode("llava", "eager") != decode("llava", None)


def test_a_compiler_that_fails_leaves_steps_captured(caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    target = toys.target("llava")
    run = captured(target, fails)  # type: ignore[arg-type]
    engine = Engine(target, Method(LayerSkipDrafter([1]), StaticTree(branching_paths([2])), Exact()), 2, 128)
    wanted = checks.requests("llava", 3)
    done = checks.run(engine, wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated("llava", request, target.eos_ids)
    assert run.mode == "captured"
    assert run.num_recordings > 0
    assert "layers run uncompiled" in caplog.text
    torch._dynamo.reset()


def test_layers_of_different_structure_are_not_fused() -> None:
    decoder = toys.target("llava").decoder
    CapturedDecoder(decoder, RunAgain())
    assert fuse(decoder) is not None
    layers: Any = decoder.layers
    handle = layers[1].self_attn.q_proj.register_forward_hook(lambda *_: None)
    assert fuse(decoder) is None
    handle.remove()
    layers[1].mlp = nn.Identity()
    assert fuse(decoder) is None
