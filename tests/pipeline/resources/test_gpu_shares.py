"""`num_gpus: auto`: the GPUs of each actor, for all pools of a job together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import ConfigError
from pipeline.resources.capacity import Capacity, Node
from pipeline.resources.gpu_shares import share_gpus, sized
from pipeline.resources.packing import fit_together, units_of
from pipeline.resources.requests import Actors
from tests.pipeline.resources.nodes import cluster, decoders, engines, machine, node, workers


def shares(capacity: Capacity, *pools: Actors) -> list[float]:
    gpus_by_pool = share_gpus(pools, capacity)
    return [gpus_by_pool[pool.where] for pool in pools]


CAPTION = [
    (0, engines(), [0]),
    (1, engines(), [1]),
    (1, engines(most=4), [1]),  # a second engine on the same GPU would bring nothing
    (1, engines(count=2), [0.5]),
    (1, engines(count=3), [0.3333]),  # Ray rounds: three times 0.33334 would be more than one
    (2, engines(count=3), [0.5]),
    (4, engines(count=4), [1]),
    (4, engines(most=8), [1]),
    (1, engines(0.0), [0]),
    (1, engines(0.25, count=2), [0.25]),
    (1, engines(devices={"model.target.device": "cpu"}), [0]),
    (1, engines(devices={"model.target.device": "mps"}), [0]),
    (1, engines(devices={"model.target.device": "cuda"}), [1]),
]


@pytest.mark.parametrize(("gpus", "pool", "expected"), CAPTION)
def test_engines_alone_share_gpus(gpus: int, pool: Actors, expected: list[float]) -> None:
    assert shares(machine(gpus), pool) == expected


IMAGES = [
    (0, engines(), decoders(), [0, 0]),
    (1, engines(), decoders(), [0.9, 0.1]),
    (2, engines(), decoders(), [0.9, 0.1]),
    (1, engines(count=2), decoders(), [0.45, 0.1]),
    (1, engines(), decoders(most=4), [0.9, 0.025]),
    (2, engines(count=3), decoders(count=3), [0.45, 0.05]),
    (8, engines(count=8), decoders(most=8), [0.9, 0.1]),
    # What is configured stays, and the other pool takes what is left.
    (1, engines(1.0), decoders(), [1, 0]),
    (1, engines(0.9), decoders(), [0.9, 0.1]),
    (1, engines(0.95), decoders(), [0.95, 0.05]),
    (1, engines(0.5), decoders(), [0.5, 0.1]),
    (1, engines(0.3, most=3), decoders(), [0.3, 0.1]),
    (1, engines(0.25, most=4), decoders(), [0.25, 0]),  # engines may grow to the whole GPU
    (2, engines(1.0), decoders(), [1, 0.1]),
    (2, engines(1.0, most=2), decoders(), [1, 0]),
    (1, engines(), decoders(0.3), [0.7, 0.3]),
    (1, engines(), decoders(0.3, most=8), [0.7, 0.3]),
    (2, engines(), decoders(0.3), [1, 0.3]),
    (2, engines(), decoders(1.0), [1, 1]),
    (1, engines(), decoders(0.0), [1, 0]),
    (1, engines(0.0), decoders(), [0, 1]),
    (1, engines(devices={"model.target.device": "cpu"}), decoders(), [0, 1]),
    (1, engines(), decoders(devices={"model.vq.device": "cpu"}), [1, 0]),
]


@pytest.mark.parametrize(("gpus", "engine", "decoder", "expected"), IMAGES)
def test_engines_and_vq_decoders_share_gpus(gpus: int, engine: Actors, decoder: Actors, expected: list[float]) -> None:
    assert shares(machine(gpus), engine, decoder) == expected


def test_an_engine_is_not_moved_to_the_cpu_because_another_pool_takes_the_gpu() -> None:
    with pytest.raises(ConfigError, match=r"^pool\.num_gpus: is auto, and vq\.num_gpus \(1\) leaves no GPU to it"):
        shares(machine(1), engines(), decoders(1.0))


counts = st.integers(1, 12)


@given(st.integers(0, 8), counts, st.integers(0, 12), counts, st.integers(0, 12))
def test_chosen_shares_always_fit(gpus: int, count: int, more: int, others: int, further: int) -> None:
    capacity = machine(gpus)
    pools = [engines(count=count, most=count + more), decoders(count=others, most=others + further)]
    gpus_by_pool = share_gpus(pools, capacity)
    assert fit_together([sized(pool, units_of(gpus_by_pool[pool.where]), capacity) for pool in pools], capacity.nodes)
    assert (gpus_by_pool["pool"] > 0) == (gpus_by_pool["vq"] > 0) == (gpus > 0)
    assert gpus_by_pool["pool"] >= 0.9 / -(-count // max(1, gpus)) - 1e-4 or not gpus


def test_workers_of_a_training_do_not_share_a_gpu() -> None:
    assert shares(machine(2), workers(2)) == [1]
    assert shares(machine(1), workers(2)) == [1]  # and this is then refused
    assert shares(machine(0), workers(2)) == [0]


def test_gpus_without_a_matching_torch_build_are_not_used() -> None:
    other = Capacity("this machine", machine(1).nodes, is_private=True, has_cuda=False)
    assert shares(other, engines()) == [0]
    assert shares(other, engines(devices={"model.target.device": "xpu"})) == [1]


def test_only_gpus_on_nodes_that_a_pool_may_use_count() -> None:
    blue, red = node(1, team="blue"), node(4, team="red")
    both = cluster(blue, red)
    here, there = {"team": "blue"}, {"team": "red"}
    assert shares(both, engines(labels=here), decoders(labels=here)) == [0.9, 0.1]
    assert shares(both, engines(labels=here), decoders(labels=there)) == [1, 1]
    assert shares(cluster(node(0, team="blue"), red), engines(labels=here)) == [0]
    assert shares(both, engines(count=2, labels=here)) == [0.5]
    typed: dict[str, Any] = {"accelerator_type": "H100"}
    h100 = Node({"CPU": 8, "GPU": 2, "accelerator_type:H100": 1}, {})
    assert shares(cluster(h100, red), engines(count=4, **typed)) == [0.5]


def test_nodes_that_an_autoscaler_can_add_count() -> None:
    grown = cluster(node(0), node(1, count=3, exists=False, kind="gpu"))
    assert shares(grown, engines(count=3), decoders()) == [0.9, 0.1]
    assert shares(grown, engines(count=4), decoders()) == [0.45, 0.1]


def test_with_unknown_node_types_auto_needs_a_gpu_that_is_there() -> None:
    assert shares(cluster(node(1), is_open=True), engines(count=3), decoders()) == [0.9, 0.1]
    with pytest.raises(
        ConfigError, match=r"^pool\.num_gpus: is auto, but the cluster at head:6379 has no GPU; the node t"
    ):
        shares(cluster(node(0), is_open=True), engines())
    assert shares(cluster(node(0), is_open=True), engines(1.0)) == [1]
