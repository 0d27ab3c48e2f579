"""Computes the bytes of the states of recurrent layers in one slot, for `pool.slots: auto`."""

from __future__ import annotations

import torch
from torch import nn

from actors.loading.method import DrafterModel, build_tree
from configs.drafters import ModelDrafterConfig, NoDrafterConfig
from configs.method import MethodConfig
from decoding.drafters.model import WIDEST
from models.backends.states.layers import recurrent_layers
from models.contract import TargetModel
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch


def slot_state_bytes(
    method: MethodConfig, target: TargetModel, drafter: DrafterModel | None
) -> dict[torch.device, int]:
    """Return the bytes of the states in one slot of target and drafter by device; empty without recurrent layers."""
    tree = build_tree(method)
    num_nodes = 1 if isinstance(method.drafter, NoDrafterConfig) else tree.max_nodes
    parts = [(target, target.num_lanes, num_nodes)]
    if isinstance(method.drafter, ModelDrafterConfig) and isinstance(drafter, TargetModel):
        # A forward that catches up on missed tokens keeps the inputs of up to WIDEST tokens.
        parts.append((drafter, len(method.contexts) * target.num_lanes, max(tree.max_frontier_nodes, WIDEST)))
    sizes: dict[torch.device, int] = {}
    for model, num_lanes, kept in parts:
        for device, num_bytes in row_state_bytes(model.decoder, model.hidden_size, kept).items():
            sizes[device] = sizes.get(device, 0) + num_lanes * num_bytes
    return sizes


@torch.inference_mode()
def row_state_bytes(decoder: nn.Module, hidden_size: int, num_nodes: int) -> dict[torch.device, int]:
    """Return the bytes of the states of one row, with the kept inputs of `num_nodes` nodes, by device.

    They are measured by a prompt of two tokens and a step, for any kind of recurrent layers.
    """
    if not recurrent_layers(decoder):
        return {}
    weight = next(decoder.parameters())
    numbers, embeds = torch.arange(2, device=weight.device), weight.new_zeros(2, hidden_size)
    lanes, slot = LaneModel(decoder, nn.Identity(), 1, 1, 4), SlotBatch(numbers[:1], (0,), (1,))
    lanes.admit(slot, [[Prefix(numbers, embeds, numbers, numbers < 0)]])
    lanes.forward_embeds(slot, embeds[None, :1], numbers[None, :1], numbers[None, None, :1] == 0)
    states = lanes.cache.states
    assert states is not None
    measured = []
    for capacity in (1, 2):
        states.reserve(capacity)
        measured.append({device: size // states.num_rows for device, size in states.num_bytes().items()})
    one, two = measured
    return {device: size + (num_nodes - 1) * (two[device] - size) for device, size in one.items()}
