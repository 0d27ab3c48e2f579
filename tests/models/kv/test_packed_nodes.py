"""Forwards of chosen nodes: their states and keys equal those of forwards of all nodes, on every kind of runner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.backends.attention import DecoderRunner
from models.backends.cpu.compiled import CompiledDecoder
from models.backends.cuda.graphs import CapturedDecoder
from models.backends.packed_nodes import Packing
from models.kv.lanes import Chosen, LaneModel, SlotBatch
from tests import toys
from tests.models.backends.cuda.test_graphs import TapeRecorder

NODES = 5


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_packing_and_unpacking_keep_chosen_nodes(num_rows: int, num_nodes: int, data: st.DataObject) -> None:
    bits = data.draw(st.lists(st.booleans(), min_size=num_rows * num_nodes, max_size=num_rows * num_nodes))
    chosen = torch.tensor(bits).view(num_rows, num_nodes)
    num = data.draw(st.integers(max(1, int(chosen.sum())), num_rows * num_nodes))
    packing = Packing.of(chosen, num)
    values = torch.arange(num_rows * num_nodes * 3).view(num_rows, num_nodes, 3)
    packed = packing.pack(values)
    assert packed.shape == (1, num, 3)
    assert torch.equal(packing.unpack(packed)[chosen], values[chosen])
    assert len(set(packing.source.tolist())) == num
    assert torch.equal(packing.pack_positions(values[..., 0])[0], packed[0, :, 0])


def runner(kind: str, decoder: Any) -> DecoderRunner:
    if kind == "compiled":
        return CompiledDecoder(decoder)
    return CapturedDecoder(decoder, TapeRecorder()) if kind == "captured" else DecoderRunner(decoder)


def batch(ids: tuple[int, ...], generated: int) -> SlotBatch:
    return SlotBatch(torch.tensor(ids), ids, (generated,) * len(ids))


@pytest.mark.usefixtures("fresh_compiler")
@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eager", "compiled", "captured"])
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_chosen_nodes_have_the_states_of_a_forward_of_all_nodes(family: str, kind: str) -> None:
    target = toys.target(family)
    generator = torch.Generator().manual_seed(5)
    run = runner(kind, target.decoder)
    every, some = (LaneModel(target.decoder, target.head, 4, 1, 96, run) for _ in range(2))
    prompts = [[target.encode(*toys.prompt(family, seed))] for seed in range(4)]
    for lanes in (every, some):
        lanes.admit(batch((0, 1, 2, 3), 1), prompts)
    parents = torch.tensor([-1, 0, 1, 0, 3])
    visible = torch.eye(NODES, dtype=torch.bool)
    for node in range(1, NODES):
        visible[node] |= visible[parents[node]]
    depth = torch.tensor([0, 1, 2, 1, 2])
    num_generated = 1
    # Slots in another order, fewer slots, and slots again that rested.
    for ids in ((0, 1, 2, 3), (2, 0, 3), (3, 1), (0, 1, 2, 3), (1, 0)):
        slots, b = batch(ids, num_generated), len(ids)
        tokens = torch.randint(4, toys.VOCAB_SIZE, (b, NODES), generator=generator)
        chosen = torch.rand(b, NODES, generator=generator) < 0.5
        chosen[:, 0] = True
        chosen[:, 2] &= chosen[:, 1]
        chosen[:, 4] &= chosen[:, 3]
        num = min(b * NODES, int(chosen.sum()) + 1)
        given = (slots, tokens, depth.expand(b, -1), visible.expand(b, -1, -1))
        expected = every.forward(*given)
        states = some.forward(*given, chosen=Chosen(chosen, num))
        mark: Tensor = chosen[:, None].expand(-1, states.shape[1], -1)
        torch.testing.assert_close(states[mark], expected[mark], atol=2e-5, rtol=2e-5)
        logits = some.logits(expected, Chosen(chosen, num))
        torch.testing.assert_close(logits[mark], every.logits(expected)[mark])
        path = torch.where(chosen[:, 1:2] & chosen[:, 2:3], torch.tensor([[0, 1, 2]]), torch.tensor([[0, 0, 0]]))
        keep = torch.where(path[:, 1] > 0, 3, 1)
        for lanes in (every, some):
            lanes.commit(slots, path, keep)
        num_generated += 3
