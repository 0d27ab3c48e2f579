"""Tests compiled layers: they equal eager layers, use one graph for many shapes, and store packed weights once."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import Completion, Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import LayerSkipDrafter, ModelDrafter, NoDrafter
from decoding.trees import Chain, StaticTree, branching_paths
from models.backends.cpu import layer_graph, packing
from models.backends.cpu.compiled import CompiledDecoder, ForwardKind, can_compile
from models.backends.memory import free_bytes
from models.kv.lanes import LaneModel, SlotBatch
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from tests import toys
from tests.conformance import checks, layer_skip
from zoo.pair import CHECKPOINTS
from zoo.text import held_out_prompts

# Importing torch's own compiler warns of a part of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.slow,
]


def states_of(lanes: LaneModel, prefixes: list[Any], shapes: list[tuple[int, int, int]]) -> list[Tensor]:
    """Hidden states of prefills and forwards of (slots, nodes, generated tokens), one after the other."""
    generator = torch.Generator().manual_seed(0)
    states = []
    with torch.inference_mode():
        for num_slots, num_nodes, num_generated in shapes:
            slots = SlotBatch(torch.arange(num_slots), tuple(range(num_slots)), (num_generated,) * num_slots)
            states.append(lanes.admit(slots, [[prefix] for prefix in prefixes[:num_slots]]).last)
            lanes.cache.lens[:num_slots] += torch.randint(0, num_generated, (num_slots,), generator=generator)
            tokens = torch.randint(5, 20, (num_slots, num_nodes), generator=generator)
            depth = torch.arange(num_nodes).expand(num_slots, -1)
            visible = torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril().expand(num_slots, -1, -1)
            states.append(lanes.forward(slots, tokens, depth, visible))
    return states


SHAPES = [
    (6, 4, 1),
    (6, 4, 60),
    (4, 2, 70),
    (3, 3, 3),
    (6, 1, 80),
    (2, 1, 5),
    (1, 4, 90),
    (1, 1, 90),
    (1, 1, 3),
    (5, 8, 8),
    (6, 4, 130),
    (2, 4, 2),
]


@pytest.mark.parametrize(("family", "shapes"), [("llava", SHAPES), ("qwen3_vl", SHAPES[::-1])])
def test_forwards_of_all_shapes_equal_uncompiled_ones_with_one_graph_a_kind(
    family: str, shapes: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(packing._packed)
    target = toys.target(family)
    prefixes = [target.encode(request.prompt, request.images, request.videos) for request in checks.requests(family, 6)]
    wanted = states_of(LaneModel(target.decoder, target.head, 6, 1, 200), prefixes, shapes)
    graphs: list[Any] = []
    merge = packing.merge_linears
    monkeypatch.setattr("models.backends.cpu.layer_graph.merge_linears", lambda graph: graphs.append(merge(graph)))
    assert target.compile()
    got = states_of(target.lanes(6, 1, 200), prefixes, shapes)
    for shape, mine, theirs in zip((shape for shape in shapes for _ in range(2)), got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4, msg=lambda text, shape=shape: f"{shape}: {text}")
    assert target._run is not None
    kept = torch._dynamo.eval_frame._debug_get_cache_entry_list(layer_graph.LayerGraph._layer.__code__)
    assert len(kept) == len(target._run.compiled)
    # Lengths that came once are called past torch's checks from then on.
    assert all(graph.pick is not None for graph in target._run._graph._graphs.values())
    assert all(graph.generated is not None for graph in target._run._graph._graphs.values())
    assert len(target._run._graph._graphs) >= len(SHAPES)
    # Query, key and value are one product, so are gate and up; the other two are separate.
    assert set(graphs) == {4}
    # Packed weights are held once for all graphs, and go with the model, which torch's own caches must not hold.
    num_layers = target.decoder.config.num_hidden_layers  # type: ignore[union-attr]
    assert len(packing._packed.keys() - before) == 4 * num_layers
    weight = weakref.ref(next(target.decoder.parameters()))
    del target
    gc.collect()
    assert packing._packed.keys() == before
    assert weight() is None


def test_heads_that_the_loops_take_run_in_them_and_equal_uncompiled_ones() -> None:
    target = Target.load(CheckpointRef(str(CHECKPOINTS / "text_target")), "float32", "cpu")
    prefixes = [target.encode(prompt, ()) for prompt in held_out_prompts(6, 0)]
    wanted = states_of(LaneModel(target.decoder, target.head, 6, 1, 220), prefixes, SHAPES)
    assert target.compile()
    states_of(target.lanes(6, 1, 220), prefixes, SHAPES)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = states_of(target.lanes(6, 1, 220), prefixes, SHAPES)
    for shape, mine, theirs in zip((shape for shape in SHAPES for _ in range(2)), got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4, msg=lambda text, shape=shape: f"{shape}: {text}")
    calls = {event.key: event.count for event in profile.key_averages()}
    # All forwards are compiled, prompts and the first of a memory as well.
    num_layers = target.decoder.config.num_hidden_layers  # type: ignore[union-attr]
    assert calls["draftfleet::attend_rows"] == num_layers * 2 * len(SHAPES)


def test_in_half_precision_the_first_forward_of_a_kv_cache_and_every_run_round_alike() -> None:
    target = Target.load(CheckpointRef(str(CHECKPOINTS / "text_target")), "bfloat16", "cpu")
    assert target.compile()
    assert target.kernels.startswith("bfloat16, cpu ")
    assert ", compiled, torch " in target.kernels
    prompts = held_out_prompts(3, 0)
    prefixes = [[target.encode(prompt, ())] for prompt in prompts]
    slots = SlotBatch(torch.arange(3), (0, 1, 2), (0,) * 3)
    lanes = target.lanes(3, 1, 220)
    with torch.inference_mode():
        first, second = (lanes.admit(slots, prefixes, max_tokens=None) for _ in range(2))
    assert torch.equal(first.last, second.last)
    wanted = [Request(str(i), prompt, (), Sampling(max_new_tokens=6)) for i, prompt in enumerate(prompts)]
    runs = []
    for _ in range(2):
        done = checks.run(Engine(target, Method(NoDrafter(), Chain(1), Exact()), 3, 220), wanted)
        runs.append({name: (completion.token_ids, completion.mean_logprob) for name, completion in done.items()})
        assert {completion.telemetry.extras["kernels"] for completion in done.values()} == {target.kernels}
    assert runs[0] == runs[1]


def engine_of(target: Target, drafter: Target) -> Engine:
    tree = StaticTree(branching_paths([2, 2]))
    return Engine(target, Method(ModelDrafter(drafter, [Full()], toys.VOCAB_SIZE), tree, Exact()), 3, 128)


def outcome(done: dict[str, Completion]) -> dict[str, object]:
    return {key: (completion.token_ids, completion.telemetry.acceptance_histogram) for key, completion in done.items()}


def test_a_compiled_pair_gives_the_output_of_the_uncompiled_pair() -> None:
    wanted = checks.requests("llava", 9)
    results = []
    for compiles in (False, True):
        target, drafter = toys.target("llava"), toys.perturbed("llava", 0.02)
        if compiles:
            assert target.compile()
            assert drafter.compile()
        results.append(outcome(checks.run(engine_of(target, drafter), wanted)))
        if compiles:
            assert target._run is not None
            assert ForwardKind(False, False, False) in target._run.compiled
    assert results[0] == results[1]


def deep_target() -> Target:
    return layer_skip.target("deep")


def test_some_layers_share_the_graph_and_the_packed_weights_of_all_and_equal_uncompiled_ones() -> None:
    wanted = checks.requests("llama", 7)
    results, sizes, others = [], [], set(packing._packed)
    for compiles in (False, True):
        target = deep_target()
        if compiles:
            assert target.compile()
        for layers in ([0, 3], [1]):
            before = len(packing._packed)
            method = Method(LayerSkipDrafter(layers), StaticTree(branching_paths([2, 2])), Exact())
            engine = Engine(target, method, 3, 128)
            results.append(outcome(checks.run(engine, wanted)))
            sizes.append(len(packing._packed) - before)
            some: Any = method.drafter
            if compiles:
                assert some._runner._graph is target._run._graph  # type: ignore[union-attr]
                assert ForwardKind(False, False, False) in some._runner.compiled
                # The frame of these layers was proven, so their forwards skip the decoder's own code.
                assert all(frame is not None for frame in some._runner._frames.values())
    assert results[:2] == results[2:]
    # All weights of four layers and the output layer are packed for the first drafter, and none for the second.
    assert sizes == [0, 0, 4 * 4 + 1, 0]
    del target, engine, method, some
    gc.collect()
    assert set(packing._packed) == others


def test_if_compilation_fails_for_some_layers_all_run_uncompiled() -> None:
    target = deep_target()
    assert target.compile()
    run = target._run
    assert isinstance(run, CompiledDecoder)
    some = run.of_layers([0, 2])
    some._graph.has_failed = True
    assert run.has_failed
    assert run.mode == some.mode == "eager, compiling failed"


def test_without_a_working_compiler_the_model_runs_uncompiled_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: torch.fx.Graph) -> int:
        raise RuntimeError("no compiler here")

    wanted = checks.requests("llava", 4)
    expected = outcome(checks.run(engine_of(toys.target("llava"), toys.perturbed("llava", 0.02)), wanted))
    monkeypatch.setattr("models.backends.cpu.layer_graph.merge_linears", broken)
    target = toys.target("llava")
    assert target.compile()
    with caplog.at_level(logging.WARNING, logger="models.backends.cpu.compiled"):
        got = outcome(checks.run(engine_of(target, toys.perturbed("llava", 0.02)), wanted))
    assert got == expected
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no compiler here" in caplog.text
    assert target._run is not None
    assert target._run.compiled == set()
    assert ", eager, compiling failed, " in target.kernels


def test_more_graphs_than_torch_makes_are_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second kind of forward would be the second graph: both run uncompiled from then on."""
    monkeypatch.setattr("models.backends.cpu.layer_graph.MAX_GRAPHS", 1)
    target = toys.target("llava")
    prefixes = [
        target.encode(request.prompt, request.images, request.videos) for request in checks.requests("llava", 6)
    ]
    shapes = [(2, 4, 1), (2, 1, 5), (2, 4, 3)]
    wanted = states_of(LaneModel(target.decoder, target.head, 6, 1, 200), prefixes, shapes)
    assert target.compile()
    with caplog.at_level(logging.WARNING, logger="models.backends.cpu.compiled"):
        got = states_of(target.lanes(6, 1, 200), prefixes, shapes)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    assert sum(record.name == "models.backends.cpu.compiled" for record in caplog.records) == 1
    assert "run uncompiled" in caplog.text
    assert isinstance(target._run, CompiledDecoder)
    assert target._run.compiled == set()


def test_weights_are_not_packed_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("models.backends.cpu.compiled.free_bytes", lambda: 1000)
    target = toys.target("llava")
    assert target.compile()
    with caplog.at_level(logging.WARNING, logger="models.backends.cpu.compiled"):
        checks.run(engine_of(target, toys.perturbed("llava", 0.02)), checks.requests("llava", 2))
    assert "0.0 GiB of memory are free" in caplog.text
    assert target._run is not None
    assert target._run.compiled == set()


def test_free_memory_is_the_machines_or_the_containers(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  4000 kB\n")
    assert free_bytes(meminfo, tmp_path) == 4000 * 1024
    for name, text in (("max", "max"), ("current", "3000000"), ("stat", "anon 5\ninactive_file 500000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_bytes(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("3600000\n")
    assert free_bytes(meminfo, tmp_path) == 3_600_000 - 3_000_000 + 500_000
    assert free_bytes() > 0


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_gemm_of_several_layers_equals_the_gemm_of_each(with_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(48, size, bias=with_bias or size == 7).to(dtype) for size in (64, 7, 33)]
    given = torch.randn(2, 3, 48, dtype=dtype)
    weights = [layer.weight for layer in layers]
    with torch.no_grad():
        out = packing.multiply(given, weights, [layer.bias for layer in layers])
        wanted = torch.cat([layer(given) for layer in layers], dim=-1)
    packing.forget(weight.data_ptr() for weight in weights)
    torch.testing.assert_close(out, wanted)


def test_layers_of_different_classes_and_weights_without_kernels_are_not_compiled() -> None:
    assert can_compile(toys.target("llava").decoder)
    assert not can_compile(toys.target("llava").decoder.double())
    other_norm = toys.target("llava").decoder
    other_norm.layers[1].input_layernorm.variance_epsilon *= 2  # type: ignore[index,union-attr,operator]
    assert not can_compile(other_norm)
    mixed = toys.target("llava").decoder
    mixed.layers[1] = torch.nn.Linear(4, 4)  # type: ignore[index,operator]
    assert not can_compile(mixed)
    assert not can_compile(torch.nn.Linear(4, 4))


def test_a_decoder_is_not_changed_and_its_compiled_layers_have_its_attributes() -> None:
    target = toys.target("llava")
    first = target.decoder.layers[0]  # type: ignore[index]
    run = CompiledDecoder(target.decoder)
    assert target.decoder.layers[0] is first  # type: ignore[index]
    wrapped = run._compiled_decoder.layers[0]  # type: ignore[index]
    assert wrapped is not first
    assert wrapped.self_attn is first.self_attn
    with pytest.raises(AttributeError, match="no_such_part"):
        _ = wrapped.no_such_part
