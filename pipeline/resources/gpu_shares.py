"""Chooses the GPUs of each actor for `num_gpus: auto`, jointly for all pools of a job. Pure.

The rule, for actors that can use a GPU and nodes that have one:

- One pool: each actor has one GPU; more actors than GPUs share them equally.
- Engines and VQ decoders: nine tenths of a GPU are the engines', one tenth the VQ decoders'.
- Beside a pool with an explicit number: an engine takes what the other actors that start leave of a GPU. A VQ decoder
  takes a tenth of a GPU at most, and less or the CPU if the engines' pool can grow to more.
- Without a GPU: 0, the CPU.

Engines share a GPU only if so many start together. VQ decoders share theirs by `max_size`, so that the pool can grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from configs.load import ConfigError
from pipeline.resources.capacity import Capacity
from pipeline.resources.packing import UNIT, Sized, fit_together, most_of, units_of
from pipeline.resources.requests import Actors

Shares = dict[str, float]
"""GPUs of each actor, by the path of its pool."""


def share_gpus(pools: Sequence[Actors], capacity: Capacity) -> Shares:
    """Return the GPUs of each actor: the number that the job names, or for `auto` the rule of this module.

    Raises:
        ConfigError: the rule has no answer, because the node types of an autoscaler cannot be read, or a pool with an
            explicit number leaves no GPU to engines or workers.
    """
    units = {pool.where: units_of(pool.gpus) for pool in pools if pool.gpus is not None}
    open_pools = [pool for pool in pools if pool.gpus is None]
    for pool in open_pools:
        if not pool.can_use_gpu or not _gpus_of(pool, capacity):
            units[pool.where] = 0
            if pool.can_use_gpu and capacity.is_open:
                raise ConfigError(
                    f"{pool.dotted}: is auto, but {capacity}; set it to 1, or to 0 if the autoscaler adds no GPUs"
                )
    remaining = [pool for pool in open_pools if pool.where not in units]
    named = [pool for pool in pools if units.get(pool.where)]
    for pool in remaining:
        near = [other for other in (*named, *remaining) if other is not pool and _meet(pool, other, capacity)]
        explicit = [other for other in near if other in named]
        units[pool.where] = (
            _beside(pool, explicit, units, capacity)
            if explicit
            else _alone(pool, pool.tenths if near else 10, capacity)
        )
    return {pool.where: _gpus(pool, units[pool.where]) for pool in pools}


def _gpus(pool: Actors, units: int) -> float:
    return pool.gpus if pool.gpus is not None else units / UNIT


def allowed(pool: Actors, capacity: Capacity) -> frozenset[int]:
    """Return the indices of the nodes that a pool's labels and accelerator type allow."""
    return frozenset(
        index
        for index, node in enumerate(capacity.nodes)
        if node.has_labels(pool.labels) and node.has_accelerator(pool.accelerator_type)
    )


def _gpus_of(pool: Actors, capacity: Capacity) -> int:
    """Return the number of GPUs that a pool may use."""
    if not capacity.has_cuda and not pool.device.startswith("xpu"):
        return 0
    return sum(capacity.nodes[index].gpus * capacity.nodes[index].count for index in allowed(pool, capacity))


def _meet(pool: Actors, other: Actors, capacity: Capacity) -> bool:
    """Return whether two pools may use the same GPU."""
    both = allowed(pool, capacity) & allowed(other, capacity)
    return any(capacity.nodes[index].gpus for index in both)


def _on_one_gpu(pool: Actors, capacity: Capacity) -> int:
    """Return how many actors of a pool share a GPU."""
    if not pool.shares or capacity.is_open:
        return 1
    count = pool.most if pool.is_minor else pool.count
    return -(-count // _gpus_of(pool, capacity))


def _alone(pool: Actors, tenths: int, capacity: Capacity) -> int:
    return max(1, UNIT * tenths // 10 // _on_one_gpu(pool, capacity))


def _beside(pool: Actors, explicit: Sequence[Actors], units: dict[str, int], capacity: Capacity) -> int:
    """Return the largest share of a GPU that fits beside the pools with an explicit number."""
    fixed = _grown if pool.is_minor else sized
    others = [fixed(other, units[other.where], capacity) for other in explicit]
    wanted, sharing = (UNIT // 10 if pool.is_minor else UNIT), _on_one_gpu(pool, capacity)
    steps = {UNIT - number * other.units for other in others for number in range(UNIT // other.units + 1)}
    for free in sorted({min(wanted, step) for step in steps if step > 0}, reverse=True):
        share = max(1, free // sharing)
        if capacity.is_open or fit_together([sized(pool, share, capacity), *others], capacity.nodes):
            return share
    if pool.is_minor:
        return 0
    names = " and ".join(f"{other.dotted} ({other.gpus:g})" for other in explicit)
    raise ConfigError(f"{pool.dotted}: is auto, and {names} leaves no GPU to it: {capacity}; leave both out (auto)")


def _grown(pool: Actors, units: int, capacity: Capacity) -> Sized:
    """Return a pool at the largest size that fits."""
    grown = sized(pool, units, capacity)
    return replace(grown, count=max(grown.count, min(pool.most, most_of(grown, capacity.nodes))))


def sized(pool: Actors, units: int, capacity: Capacity, cpus: float = 0.0) -> Sized:
    """Return the actors of a pool that start together."""
    return Sized(pool.count, units, cpus, allowed(pool, capacity))
