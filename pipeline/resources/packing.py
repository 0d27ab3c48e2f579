"""Decides whether actors fit on the GPUs of a cluster's nodes together. Pure arithmetic in Ray's units."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.resources.capacity import Node

UNIT = 10_000
"""Ray counts resources in ten-thousandths."""
MAX_EXACT = 64
"""Maximum number of actors whose places are computed exactly; the GPUs of more actors are only added up."""

Counts = tuple[int, ...]
"""A number of actors of each pool."""


@dataclass(frozen=True)
class Sized:
    """`count` actors with `units` of GPUs each (`UNIT` is one GPU) and `cpus`, which may run on some of the nodes."""

    count: int
    units: int
    cpus: float
    nodes: frozenset[int]
    """Indices of the nodes on which these actors may run."""


def units_of(gpus: float) -> int:
    return round(gpus * UNIT)


def most_of(pool: Sized, nodes: Sequence[Node]) -> int:
    """Return how many actors of one pool the nodes can hold."""
    return sum(nodes[index].count * _most_on(pool, nodes[index]) for index in pool.nodes)


def fit_together(pools: Sequence[Sized], nodes: Sequence[Node]) -> bool:
    """Return whether all actors of the pools can run at the same time. False is certain; True is certain for at most
    `MAX_EXACT` actors. Ray never splits a share of a GPU between GPUs, or GPUs of one actor between nodes."""
    pools = [pool for pool in pools if pool.units and pool.count]
    need = tuple(pool.count for pool in pools)
    kinds: Counter[tuple[int, float, Counts]] = Counter()
    for index, node in enumerate(nodes):
        room = tuple(_most_on(pool, node) if index in pool.nodes else 0 for pool in pools)
        if any(room):
            kinds[node.gpus, node.cpus, room] += node.count
    if not _sums_suffice(pools, kinds):
        return False
    if sum(need) > MAX_EXACT:
        return True
    placed = {(0,) * len(pools)}
    for (gpus, cpus, room), number in kinds.items():
        combinations = _on_node(pools, gpus, cpus, tuple(map(min, room, need)))
        for _ in range(min(number, sum(need))):
            placed = _sums(placed, combinations, need)
            if need in placed:
                return True
    return need in placed


def _most_on(pool: Sized, node: Node) -> int:
    """Return how many actors of one pool a node can hold alone."""
    number = node.gpus * (UNIT // pool.units) if pool.units <= UNIT else node.gpus // -(-pool.units // UNIT)
    return min(number, int(node.cpus / pool.cpus)) if pool.cpus else number


def _sums_suffice(pools: Sequence[Sized], kinds: Counter[tuple[int, float, Counts]]) -> bool:
    """Return whether there is room for each pool alone, and GPUs for all of them together."""
    room = [sum(number * kind[2][index] for kind, number in kinds.items()) for index in range(len(pools))]
    gpus = sum(number * kind[0] for kind, number in kinds.items())
    total = sum(pool.count * pool.units for pool in pools)
    return all(number >= pool.count for number, pool in zip(room, pools, strict=True)) and total <= gpus * UNIT


def _on_node(pools: Sequence[Sized], gpus: int, cpus: float, most: Counts) -> set[Counts]:
    """Return the largest combinations of actors on one node, at most `most` of each pool."""
    ranges = [range(limit + 1) if pool.units > UNIT else (0,) for pool, limit in zip(pools, most, strict=True)]
    combinations: set[Counts] = set()
    shares = _on_gpu(pools, most)
    for start in itertools.product(*ranges):
        remaining = gpus - sum(number * -(-pool.units // UNIT) for number, pool in zip(start, pools, strict=True))
        if remaining < 0:
            continue
        placed = {start}
        for _ in range(min(remaining, sum(most))):
            placed = _sums(placed, shares, most)
        combinations |= placed
    return _largest(itertools.chain.from_iterable(_within_cpus(counts, pools, cpus) for counts in combinations))


def _on_gpu(pools: Sequence[Sized], most: Counts) -> set[Counts]:
    """Return the largest combinations of actors that share one GPU."""
    fits: set[Counts] = {()}
    for pool, limit in zip(pools, most, strict=True):
        fits = {(*counts, number) for counts in fits for number in range(_room_on_gpu(pools, counts, pool, limit) + 1)}
    return _largest(fits)


def _room_on_gpu(pools: Sequence[Sized], counts: Counts, pool: Sized, limit: int) -> int:
    if pool.units > UNIT:
        return 0
    remaining = UNIT - sum(number * other.units for number, other in zip(counts, pools, strict=False))
    return min(limit, remaining // pool.units)


def _within_cpus(counts: Counts, pools: Sequence[Sized], cpus: float) -> Iterable[Counts]:
    """Yield the combinations below `counts` for which the CPUs of a node suffice."""

    def suffice(some: Counts) -> bool:
        return sum(number * pool.cpus for number, pool in zip(some, pools, strict=True)) <= cpus + 1 / UNIT

    if suffice(counts):
        return [counts]
    return filter(suffice, itertools.product(*(range(number + 1) for number in counts)))


def _sums(left: set[Counts], right: set[Counts], most: Counts) -> set[Counts]:
    return _largest(tuple(map(min, map(sum, zip(a, b, strict=True)), most)) for a in left for b in right)


def _largest(combinations: Iterable[Counts]) -> set[Counts]:
    """Return the combinations that no other one contains."""
    largest: set[Counts] = set()
    for counts in sorted(set(combinations), reverse=True):
        if not any(all(map(int.__ge__, other, counts)) for other in largest):
            largest.add(counts)
    return largest
