"""Computes the number of slots of an engine for `pool.slots: auto`, from free device memory and bytes per slot.

The number is computed once, after an actor has loaded its models. Where the target's KV cache has pages, slots have no
KV positions of their own, and samples share the pages that fit beside the slots.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from actors.loading.method import DrafterModel, build_tree
from actors.loading.state_bytes import slot_state_bytes
from configs.drafters import LayerSkipDrafterConfig, ModelDrafterConfig, MtpDrafterConfig, NoDrafterConfig
from configs.method import MethodConfig
from configs.pool import EnginePoolConfig
from decoding.drafters.model import WIDEST
from models.backends.pages import PAGE_POSITIONS, num_pages_of
from models.backends.select import backend_for
from models.contract import TargetModel
from models.heads.block import BlockNetwork
from models.heads.eagle import FeatureStack
from models.heads.medusa import MedusaHeads
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch

logger = logging.getLogger(__name__)

LOGIT_COPIES = 6
"""Number of fp32 tensors with the shape of a step's logits that exist at once: target logits, processed logits, noise
and temporaries."""

ROWS_PER_CONTEXT = 4
"""Samples that share the KV positions of one longest context, for the number of slots: prompts and outputs differ in
length, and the longest context is seldom needed. If they need more, slots are empty until pages are free."""

Sizes = Counter[torch.device]


@dataclass(frozen=True)
class SlotCount:
    """Number of slots, the pages that each adds to the KV cache, None without pages, and the limiting reason."""

    slots: int
    pages_per_slot: float | None
    reason: str


def count_slots(
    pool: EnginePoolConfig,
    methods: Sequence[MethodConfig],
    target: TargetModel,
    drafter: DrafterModel | None,
    max_context_tokens: int,
) -> SlotCount:
    """Return the number of slots, at least 1, that fit into free memory with each method."""
    in_flight = pool.max_batches_in_flight * pool.rows_per_batch
    bounds = {
        target.backend.max_slots: "the most that are worth it on this device",
        in_flight: f"the rows of {pool.max_batches_in_flight} batches in flight",
    }
    target_position = position_bytes(target.decoder, target.hidden_size)
    drafter_position = _drafter_position(drafter)
    per_slot = Sizes()
    for method in methods:
        sizes = slot_bytes(method, target, target_position, drafter_position, max_context_tokens)
        sizes.update(slot_state_bytes(method, target, drafter))  # adds
        per_slot |= sizes
    # Images have one length, so that they gain nothing from pages.
    is_paged = target.max_new_tokens is None and reads_rows(target.decoder, target.hidden_size)
    shares = dict.fromkeys(per_slot, 0)
    if is_paged:
        context = num_positions(methods, target, max_context_tokens)
        shares = {device: context * target_position.get(device, 0) for device in per_slot}
    for device, num_bytes in per_slot.items():
        free, num_bytes = usable_bytes(pool, device), num_bytes - shares[device] + shares[device] // ROWS_PER_CONTEXT
        fitting = max(1, free // num_bytes)
        bounds[fitting] = f"{free / 2**30:,.2f} GiB of {device} for {num_bytes / 2**20:,.1f} MiB each"
    slots = min(bounds)
    others = ", ".join(f"{number:,} by {why}" for number, why in sorted(bounds.items())[1:])
    reason = bounds[slots] + (f" (not {others})" if others else "")
    pages_per_slot = None
    if is_paged:
        # Memory that slots do not need is for more pages, up to one longest context per slot.
        positions = [
            (usable_bytes(pool, device) / slots - (num_bytes - shares[device])) / target_position[device]
            for device, num_bytes in per_slot.items()
            if shares[device]
        ]
        most = target.num_lanes * num_pages_of(context // target.num_lanes)
        pages_per_slot = min(most, max(context / ROWS_PER_CONTEXT, min(positions)) / PAGE_POSITIONS)
        reason += f"; {int(slots * pages_per_slot):,} pages of {PAGE_POSITIONS} KV positions"
    logger.warning("pool.slots is auto: %d slots: %s", slots, reason)
    return SlotCount(slots, pages_per_slot, reason)


def num_positions(methods: Iterable[MethodConfig], target: TargetModel, max_context_tokens: int) -> int:
    """Return the KV positions of a slot of the target for the longest context, over all lanes."""
    return max(target.num_lanes * (max_context_tokens + _num_scratch(method) + 1) for method in methods)


def _num_scratch(method: MethodConfig) -> int:
    return build_tree(method).num_scratch(isinstance(method.drafter, LayerSkipDrafterConfig))


def slot_bytes(
    method: MethodConfig,
    target: TargetModel,
    target_position: dict[torch.device, int],
    drafter_position: dict[torch.device, int],
    max_context_tokens: int,
) -> Sizes:
    """Return the bytes of one slot on each device: KV caches of target and drafter, and logits."""
    tree = build_tree(method)
    positions = num_positions([method], target, max_context_tokens)
    sizes = Sizes({device: positions * num_bytes for device, num_bytes in target_position.items()})
    if method.needs_checkpoint:
        is_model = isinstance(method.drafter, ModelDrafterConfig)
        num_lanes = len(method.contexts) * target.num_lanes if is_model else target.num_lanes
        # A forward that catches up on missed tokens needs up to WIDEST scratch positions.
        positions = num_lanes * (max_context_tokens + max(tree.max_frontier_nodes, WIDEST) + 3)
        for device, num_bytes in drafter_position.items():
            sizes[device] += positions * num_bytes
    if isinstance(method.drafter, MtpDrafterConfig):
        assert target.mtp is not None, "the pair loads the target's MTP layer"
        positions = target.num_lanes * (max_context_tokens + max(tree.max_frontier_nodes, WIDEST) + 3)
        for device, num_bytes in position_bytes(target.mtp, target.hidden_size).items():
            sizes[device] += positions * num_bytes
    num_nodes = 1 if isinstance(method.drafter, NoDrafterConfig) else tree.max_nodes
    sizes[target.device] += LOGIT_COPIES * num_nodes * target.num_lanes * target.vocab_size * 4
    return sizes


def usable_bytes(pool: EnginePoolConfig, device: torch.device) -> int:
    """Return the bytes of a device that one actor of the pool may use for slots; see `Backend.usable_bytes`."""
    return backend_for(device).usable_bytes(device, pool.gpus, pool.max_size)


def _drafter_position(drafter: DrafterModel | None) -> dict[torch.device, int]:
    """Return the drafter's KV cache bytes per position on each device; empty if it has no KV cache."""
    if drafter is None or isinstance(drafter, MedusaHeads):
        return {}
    if isinstance(drafter, BlockNetwork):
        return position_bytes(drafter.context, drafter.hidden_size)
    decoder = drafter if isinstance(drafter, FeatureStack) else drafter.decoder
    return position_bytes(decoder, drafter.hidden_size)


@torch.inference_mode()
def position_bytes(decoder: nn.Module, hidden_size: int) -> dict[torch.device, int]:
    """Return the bytes of keys and values of one position of one row, summed over layers, by device.

    They are measured by a prefill of two positions, for any decoder architecture.
    """
    cache = _filled(decoder, hidden_size).cache
    sizes: dict[torch.device, int] = {}
    for memory in (*cache.keys, *cache.values):
        if memory is None and cache.states is not None:
            continue  # a layer without attention
        assert memory is not None, "a layer of the decoder has written nothing"
        num_bytes = memory.shape[1] * memory.shape[3] * memory.element_size()
        sizes[memory.device] = sizes.get(memory.device, 0) + num_bytes
    return sizes


@torch.inference_mode()
def reads_rows(decoder: nn.Module, hidden_size: int) -> bool:
    """Return whether attention reads rows of the decoder's KV cache by number, which pages need."""
    return _filled(decoder, hidden_size).rows.are_indexed


def _filled(decoder: nn.Module, hidden_size: int) -> LaneModel:
    """Return a KV cache with a prompt of two tokens."""
    weight = next(decoder.parameters())
    length, device = 2, weight.device
    lanes = LaneModel(decoder, nn.Identity(), 1, 1, length)
    numbers = torch.arange(length, device=device)
    embeds = torch.zeros(length, hidden_size, dtype=weight.dtype, device=device)
    first = SlotBatch(numbers[:1], (0,), (0,))
    lanes.admit(first, [[Prefix(numbers, embeds, numbers, numbers < 0)]])
    return lanes
