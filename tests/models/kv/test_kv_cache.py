"""Ragged KV caches and tree masks, compared with slow and simple implementations."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.backends.attention import ancestors, tree_mask
from models.backends.cache import RaggedCache


@st.composite
def parent_rows(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 17))
    return [-1] + [draw(st.integers(-1, i - 1)) for i in range(1, size)]  # −1 elsewhere: an invalid node


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(parent_rows(), min_size=1, max_size=3))
def test_ancestors_are_found_by_following_parents(rows: list[list[int]]) -> None:
    width = max(map(len, rows))
    padded = [row + [0] * (width - len(row)) for row in rows]
    result = ancestors(torch.tensor(padded))
    for b, row in enumerate(padded):
        for node in range(width):
            line = {node}
            while row[min(line)] >= 0 and min(line) > 0:
                line.add(row[min(line)])
            assert {j for j in range(width) if result[b, node, j]} == line


@settings(max_examples=60, deadline=None)
@given(lens=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=st.integers(0, 999), extra=st.integers(0, 5))
def test_the_mask_allows_committed_positions_and_visible_scratch_positions_only(
    lens: list[int], seed: int, extra: int
) -> None:
    visible = torch.rand(len(lens), 3, 5, generator=torch.Generator().manual_seed(seed)) < 0.5
    window = max(lens) + 5 + extra
    mask = tree_mask(torch.tensor(lens), visible, window)
    for b, length in enumerate(lens):
        for node in range(3):
            for column in range(window):
                scratch = 0 <= column - length < 5 and bool(visible[b, node, column - length])
                assert bool(mask[b, 0, node, column]) == (column < length or scratch)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_compaction_keeps_the_named_columns_in_order_and_touches_no_other_row(data: st.DataObject) -> None:
    num_rows, capacity, num_nodes = 4, 16, 5
    cache = RaggedCache(num_rows, capacity, 2, torch.device("cpu"))
    everyone, columns = torch.arange(num_rows), torch.arange(capacity).expand(num_rows, -1)
    stamp = (torch.arange(num_rows)[:, None] * 100 + torch.arange(capacity))[:, None, :, None].float()
    for layer in range(2):
        cache.write(layer, cache.locate(everyone, columns), stamp + layer, -stamp)
    lens = [data.draw(st.integers(0, capacity - num_nodes)) for _ in range(num_rows)]
    cache.lens = torch.tensor(lens)
    rows = data.draw(st.lists(st.sampled_from(range(num_rows)), min_size=1, max_size=num_rows, unique=True))
    paths = [sorted(data.draw(st.sets(st.integers(1, num_nodes - 1), max_size=3))) for _ in rows]
    keep = [1 + len(path) for path in paths]
    source = torch.tensor([[0, *path, *[0] * (3 - len(path))] for path in paths])
    cache.compact(torch.tensor(rows), source, torch.tensor(keep))
    cache.advance(torch.tensor(rows), torch.tensor(keep))
    for row in range(num_rows):
        held = cache.keys[1][row, 0, :, 0].tolist()  # type: ignore[index]
        start = lens[row]
        kept = [0, *paths[rows.index(row)]] if row in rows else []
        assert held[:start] == [row * 100 + c + 1 for c in range(start)]
        assert held[start : start + len(kept)] == [row * 100 + start + offset + 1 for offset in kept]
        assert int(cache.lens[row]) == start + len(kept)


def test_a_view_and_a_copy_of_the_kv_cache_are_equal() -> None:
    cache = RaggedCache(3, 8, 1, torch.device("cpu"))
    values = torch.arange(3 * 8.0).view(3, 1, 8, 1)
    cache.write(0, cache.locate(torch.arange(3), torch.arange(8).expand(3, -1)), values, values)
    view, _ = cache.read(0, torch.arange(2), 2, 5)
    copy, _ = cache.read(0, torch.tensor([0, 1]), None, 5)
    assert torch.equal(view, copy)
    assert view.data_ptr() == cache.keys[0].data_ptr()  # type: ignore[union-attr]
