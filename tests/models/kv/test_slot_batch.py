"""Tests reads and writes of per-slot state for subsets of slots."""

from __future__ import annotations

import pytest
import torch

from models.kv.lanes import SlotBatch

IDS = [(0, 1, 2), (0,), (1, 2), (2, 0), (3, 1, 0), ()]


def batch(ids: tuple[int, ...]) -> SlotBatch:
    return SlotBatch(torch.tensor(ids, dtype=torch.long), ids, tuple(10 + slot for slot in ids))


@pytest.mark.parametrize("ids", IDS)
def test_reading_writing_and_adding_touch_these_slots_and_no_other(ids: tuple[int, ...]) -> None:
    slots, memory = batch(ids), torch.arange(8).view(4, 2)
    assert slots.of(memory).tolist() == [memory[slot].tolist() for slot in ids]
    values = -torch.arange(1, 2 * len(ids) + 1).view(len(ids), 2)
    slots.put(memory, values)
    expected = torch.arange(8).view(4, 2)
    for index, slot in enumerate(ids):
        expected[slot] = values[index]
    assert memory.equal(expected)
    counts = torch.tensor([5, 6, 7, 8])
    slots.add(counts, torch.arange(1, len(ids) + 1))
    slots.add(counts, torch.full((len(ids),), 3), sign=-1)
    assert counts.tolist() == [5 + slot + (ids.index(slot) - 2 if slot in ids else 0) for slot in range(4)]


def test_spare_slots_count_nothing() -> None:
    slots = SlotBatch(torch.tensor([2, 0, 3]), (2,), (12,), torch.tensor([True, False, False]))
    counts = torch.tensor([5, 6, 7, 8])
    slots.add(counts, torch.tensor([4, 5, 6]))
    assert counts.tolist() == [5, 6, 11, 8]
    assert slots.counted(torch.ones(3, 2)).tolist() == [[1, 1], [0, 0], [0, 0]]
    assert slots.some([2]).index.tolist() == [2]


def test_some_slots_of_a_batch_keep_its_order() -> None:
    some = batch((3, 1, 0)).some([0, 3])
    assert (some.ids, some.num_generated, some.index.tolist()) == ((3, 0), (13, 10), [3, 0])
    assert batch((3, 1)).some({1, 3}).ids == (3, 1)
    assert batch((3, 1)).some([]).ids == ()
