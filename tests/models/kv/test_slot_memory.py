"""Tests that the computed bytes per KV position equal the engine's allocation, for every family."""

from __future__ import annotations

import pytest
import torch

from actors.loading.slot_count import position_bytes
from models.backends.select import backend_for
from tests import toys
from tests.conformance import checks, heads

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", list(toys.FAMILIES))
def test_the_size_of_a_kv_position_is_what_the_engine_allocates(family: str) -> None:
    target = toys.target(family)
    sizes = position_bytes(target.decoder, target.hidden_size)
    engine = checks.Engine(target, checks.Method(checks.NoDrafter(), checks.Chain(1), checks.Exact()), 3, 160)
    checks.run(engine, checks.requests(family, 1))
    cache = engine._lanes.cache
    held = sum(memory.numel() * memory.element_size() for memory in (*cache.keys, *cache.values) if memory is not None)
    assert sizes == {CPU: held // (cache.num_rows * (cache.capacity + 1))}


def test_a_column_is_two_tensors_of_every_layers_key_value_heads() -> None:
    target = toys.target("llama")
    config = target.decoder.config
    expected = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4  # type: ignore[union-attr]
    assert position_bytes(target.decoder, target.hidden_size) == {CPU: expected}


def test_half_precision_takes_half() -> None:
    whole, half = toys.target("llama"), toys.target("llama")
    half.decoder.to(torch.bfloat16)
    sizes = [position_bytes(target.decoder, target.hidden_size)[CPU] for target in (whole, half)]
    assert sizes[0] == 2 * sizes[1]


def test_the_kv_cache_of_an_eagle_head_has_its_own_size() -> None:
    network = heads.eagle("llama")
    (num_bytes,) = position_bytes(network, network.hidden_size).values()
    target = toys.target("llama")
    assert (
        num_bytes * target.decoder.config.num_hidden_layers == position_bytes(target.decoder, target.hidden_size)[CPU]
    )  # type: ignore[union-attr]


def test_measuring_leaves_the_models_output_as_it_was() -> None:
    target = toys.target("llama")
    position_bytes(target.decoder, target.hidden_size)
    request = checks.requests("llama", 1)[0]
    engine = checks.Engine(target, checks.Method(checks.NoDrafter(), checks.Chain(1), checks.Exact()), 2, 160)
    done = checks.run(engine, [request])
    assert done[request.sample_id].token_ids == checks.generated("llama", request, target.eos_ids)


def test_free_memory_of_the_cpu_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.backends.base.free_bytes", lambda: 12345)
    assert backend_for(CPU).free_bytes(CPU) == 12345
