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
    pools = [one for one in pools if one.units and one.count]
    need = tuple(one.count for one in pools)
    kinds: Counter[tuple[int, float, Counts]] = Counter()
    for index, node in enumerate(nodes):
        room = tuple(_most_on(one, node) if index in one.nodes else 0 for one in pools)
        if any(room):
            kinds[node.gpus, node.cpus, room] += node.count
    if not _sums_suffice(pools, kinds):
        return False
    if sum(need) > MAX_EXACT:
        return True
    placed = {(0,) * len(pools)}
    for (gpus, cpus, room), number in kinds.items():
        own = _on_node(pools, gpus, cpus, tuple(map(min, room, need)))
        for _ in range(min(number, sum(need))):
            placed = _sums(placed, own, need)
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
    total = sum(one.count * one.units for one in pools)
    return all(number >= one.count for number, one in zip(room, pools, strict=True)) and total <= gpus * UNIT


def _on_node(pools: Sequence[Sized], gpus: int, cpus: float, most: Counts) -> set[Counts]:
    """Return the largest combinations of actors on one node, at most `most` of each pool."""
    whole = [range(limit + 1) if one.units > UNIT else (0,) for one, limit in zip(pools, most, strict=True)]
    found: set[Counts] = set()
    shares = _on_gpu(pools, most)
    for start in itertools.product(*whole):
        left = gpus - sum(number * -(-one.units // UNIT) for number, one in zip(start, pools, strict=True))
        if left < 0:
            continue
        placed = {start}
        for _ in range(min(left, sum(most))):
            placed = _sums(placed, shares, most)
        found |= placed
    return _largest(itertools.chain.from_iterable(_within_cpus(one, pools, cpus) for one in found))


def _on_gpu(pools: Sequence[Sized], most: Counts) -> set[Counts]:
    """Return the largest combinations of actors that share one GPU."""
    found: set[Counts] = {()}
    for one, limit in zip(pools, most, strict=True):
        found = {(*counts, number) for counts in found for number in range(_room_on_gpu(pools, counts, one, limit) + 1)}
    return _largest(found)


def _room_on_gpu(pools: Sequence[Sized], counts: Counts, pool: Sized, limit: int) -> int:
    if pool.units > UNIT:
        return 0
    left = UNIT - sum(number * one.units for number, one in zip(counts, pools, strict=False))
    return min(limit, left // pool.units)


def _within_cpus(counts: Counts, pools: Sequence[Sized], cpus: float) -> Iterable[Counts]:
    """Yield the combinations below `counts` for which the CPUs of a node suffice."""

    def suffice(some: Counts) -> bool:
        return sum(number * one.cpus for number, one in zip(some, pools, strict=True)) <= cpus + 1 / UNIT

    if suffice(counts):
        return [counts]
    return filter(suffice, itertools.product(*(range(number + 1) for number in counts)))


def _sums(left: set[Counts], right: set[Counts], most: Counts) -> set[Counts]:
    return _largest(tuple(map(min, map(sum, zip(a, b, strict=True)), most)) for a in left for b in right)


def _largest(found: Iterable[Counts]) -> set[Counts]:
    """Return the combinations that no other one contains."""
    kept: set[Counts] = set()
    for one in sorted(set(found), reverse=True):
        if not any(all(map(int.__ge__, other, one)) for other in kept):
            kept.add(one)
    return kept
