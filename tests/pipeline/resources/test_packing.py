"""Whether actors fit on GPUs together, against a search that places one actor after the other."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.resources.capacity import Node
from pipeline.resources.packing import MAX_EXACT, UNIT, Sized, fit_together, most_of
from tests.pipeline.resources.nodes import node

Actor = tuple[int, float, frozenset[int]]


def can_place(actors: list[Actor], gpus: list[list[int]], cpus: list[float]) -> bool:
    """Place the first actor on every possible GPU, and the others after it."""
    if not actors:
        return True
    (units, each_cpus, allowed), *others = actors
    for index in allowed:
        if cpus[index] < each_cpus:
            continue
        left = gpus[index]
        candidates = [[node] for node in range(len(left)) if left[node] >= units] if units <= UNIT else []
        free = [node for node in range(len(left)) if left[node] == UNIT]
        if units > UNIT and len(free) >= units // UNIT:
            candidates = [free[: units // UNIT]]
        for gpus_of_actor in candidates:
            for gpu in gpus_of_actor:
                left[gpu] -= min(units, UNIT)
            cpus[index] -= each_cpus
            fits = can_place(others, gpus, cpus)
            cpus[index] += each_cpus
            for gpu in gpus_of_actor:
                left[gpu] += min(units, UNIT)
            if fits:
                return True
    return False


def oracle(pools: list[Sized], nodes: list[Node]) -> bool:
    actors = [(pool.units, pool.cpus, pool.nodes) for pool in pools if pool.units for _ in range(pool.count)]
    return can_place(actors, [[UNIT] * node.gpus for node in nodes], [node.cpus for node in nodes])


sizes = st.sampled_from([0, 2500, 3000, 4500, 5000, 6000, 7000, 9000, 10_000, 20_000])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Sized], list[Node]]:
    nodes = [node(draw(st.integers(0, 2)), draw(st.integers(0, 4))) for _ in range(draw(st.integers(1, 3)))]
    subsets = st.frozensets(st.integers(0, len(nodes) - 1))
    pools = [
        Sized(draw(st.integers(0, 3)), draw(sizes), draw(st.sampled_from([0.0, 1.0])), draw(subsets))
        for _ in range(draw(st.integers(1, 2)))
    ]
    return pools, nodes


BOTH = frozenset({0})


@given(cases())
@example(([Sized(2, 6000, 1.0, BOTH)], [node(1)]))
@example(([Sized(2, 7000, 1.0, BOTH), Sized(1, 4000, 1.0, BOTH)], [node(2)]))  # 18 of 20 tenths, and no place
@example(([Sized(1, 10_000, 1.0, BOTH), Sized(1, 1000, 1.0, BOTH)], [node(1)]))
@example(([Sized(1, 20_000, 1.0, BOTH), Sized(1, 1000, 1.0, BOTH)], [node(2)]))
@example(([Sized(2, 5000, 1.0, BOTH)], [node(2, cpus=1)]))
def test_actors_fit_if_and_only_if_a_search_finds_nodes_for_them(case: tuple[list[Sized], list[Node]]) -> None:
    assert fit_together(*case) == oracle(*case)


@settings(max_examples=40)
@given(cases())
def test_the_maximum_number_of_actors_fits_and_one_more_does_not(case: tuple[list[Sized], list[Node]]) -> None:
    pools, nodes = case
    pool = pools[0]
    if not pool.units:
        return
    most = most_of(pool, nodes)
    assert oracle([Sized(most, pool.units, pool.cpus, pool.nodes)], nodes)
    assert not oracle([Sized(most + 1, pool.units, pool.cpus, pool.nodes)], nodes)


def test_equal_nodes_count_and_many_actors_are_added_up() -> None:
    both = frozenset({0})
    for number in (MAX_EXACT // 2, 10**9):
        nodes = [node(8, cpus=64, count=number)]
        fitting = [Sized(8 * number, 9000, 1.0, both), Sized(8 * number, 1000, 1.0, both)]
        assert fit_together(fitting, nodes)
        assert not fit_together([fitting[0], Sized(8 * number + 1, 1000, 1.0, both)], nodes)
        assert not fit_together([Sized(8 * number + 1, 9000, 1.0, both)], nodes)
