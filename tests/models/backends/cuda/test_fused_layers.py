"""Captured steps with fused layers equal eager ones; a CPU traces the shared layer, and one test compiles it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu.models import RunAgain
from decoding import Engine, Method
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import LayerSkipDrafter, ModelDrafter
from decoding.trees import StaticTree, branching_paths
from models.backends.base import REFERENCE
from models.backends.cuda import fused_layers
from models.backends.cuda.backend import CudaBackend
from models.backends.cuda.fused_layers import INDUCTOR, fuse
from models.backends.cuda.graphs import CapturedDecoder
from models.kv.lanes import LaneModel
from models.target import Target
from tests import toys
from tests.conformance import checks
from tests.models.plain_first_part import plain

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def captured(model: Target, compiler: str) -> CapturedDecoder:
    run = CapturedDecoder(model.decoder, RunAgain(), True, compiler)
    model.lanes = functools.partial(_lanes, model, run)  # type: ignore[method-assign]
    return run


def _lanes(model: Target, run: CapturedDecoder, slots: int, lanes: int, capacity: int, features: Any = ()) -> LaneModel:
    return LaneModel(model.decoder, model.head, slots, lanes, capacity, run, features)


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
    return {key: (one.token_ids, one.telemetry.acceptance_histogram) for key, one in done.items()}


@pytest.fixture(params=["mask", "two parts"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention under one mask, or in two parts with a plain kernel."""
    if request.param == "two parts":
        backend = CudaBackend()
        for name in ("copy_to_host", "copy_to_device"):
            monkeypatch.setattr(backend, name, getattr(REFERENCE, name))
        monkeypatch.setattr("models.backends.cuda.backend.first_part", lambda *_: plain)
        monkeypatch.setattr("models.kv.lanes.backend_for", lambda _: backend)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3"])
def test_fused_layers_give_the_output_of_the_layers(family: str, attention: None) -> None:
    assert decode(family, "eager") == decode(family, None)


@pytest.mark.parametrize("attention", ["two parts"], indirect=True)
def test_compiled_layers_give_the_output_of_the_layers(attention: None) -> None:
    assert decode("llava", INDUCTOR) == decode("llava", None)


def test_some_of_the_layers_are_fused_on_their_own() -> None:
    results = []
    for is_fused in (False, True):
        target = toys.target("llava")
        if is_fused:
            captured(target, "eager")
        drafter = LayerSkipDrafter([1])
        engine = Engine(target, Method(drafter, StaticTree(branching_paths([2, 2])), Exact()), 3, 128)
        done = checks.run(engine, checks.requests("llava", 9))
        results.append({key: (one.token_ids, one.telemetry.acceptance_histogram) for key, one in done.items()})
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
        object.__setattr__(step, "columns", late)
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
    assert "steps are captured uncompiled" in caplog.text
    torch._dynamo.reset()


def test_layers_of_different_structure_are_not_fused() -> None:
    decoder = toys.target("llava").decoder
    CapturedDecoder(decoder, RunAgain())
    assert fuse(decoder) is not None
    layers: Any = decoder.layers
    layers[1].mlp = nn.Identity()
    assert fuse(decoder) is None
