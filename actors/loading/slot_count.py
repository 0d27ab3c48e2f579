"""The number of slots of an engine under `pool.slots: auto`, from free device memory.

Computed once, after an actor has loaded its models, from the bytes per slot of each model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

import torch

from actors.loading.method import build_tree
from configs.method import Method, ModelDrafter, NoDrafter
from configs.schema import EnginePool
from decoding.drafters.missed import WIDEST
from models.backends.select import backend_for
from models.contract import TargetModel
from models.heads.eagle import EagleNetwork
from models.heads.medusa import MedusaHeads
from models.kv.slot_memory import position_bytes

logger = logging.getLogger(__name__)

LOGIT_COPIES = 6
"""Tensors of the size of the step's logits in fp32 that exist at once: raw, warped, noise and temporaries."""

Sizes = Counter[torch.device]


def count_slots(
    pool: EnginePool,
    methods: Iterable[Method],
    target: TargetModel,
    drafter: TargetModel | EagleNetwork | MedusaHeads | None,
    max_context_tokens: int,
    usable: Callable[[EnginePool, torch.device], int] | None = None,
) -> tuple[int, str]:
    """The number of slots that fit beside the loaded models for every one of `methods`, at least one, and the reason.

    `usable` returns the bytes of a device for slots; see `Backend.usable_bytes`.
    """
    usable = usable or usable_bytes
    in_flight = pool.max_batches_in_flight * pool.batch_rows
    bounds = {
        target.backend.max_slots: "the most that are worth it on this device",
        in_flight: f"the rows of {pool.max_batches_in_flight} batches in flight",
    }
    target_column = position_bytes(target.decoder, target.hidden_size)
    drafter_column = _drafter_column(drafter)
    per_slot = Sizes()
    for method in methods:
        per_slot |= slot_bytes(method, target, target_column, drafter_column, max_context_tokens)
    for device, num_bytes in per_slot.items():
        free = usable(pool, device)
        fitting = max(1, free // num_bytes)
        bounds[fitting] = f"{free / 2**30:,.2f} GiB of {device} for {num_bytes / 2**20:,.1f} MiB each"
    slots = min(bounds)
    others = ", ".join(f"{number:,} by {why}" for number, why in sorted(bounds.items())[1:])
    reason = f"{bounds[slots]}" + (f" (not {others})" if others else "")
    logger.warning("pool.slots is auto: %d slots: %s", slots, reason)
    return slots, reason


def slot_bytes(
    method: Method,
    target: TargetModel,
    target_column: dict[torch.device, int],
    drafter_column: dict[torch.device, int],
    max_context_tokens: int,
) -> Sizes:
    """What one slot takes of each device, memory and logits of both models."""
    tree = build_tree(method)
    sizes = Sizes()
    columns = target.num_lanes * (max_context_tokens + tree.max_nodes + 1)
    for device, num_bytes in target_column.items():
        sizes[device] += columns * num_bytes
    if method.needs_checkpoint:
        is_model = isinstance(method.drafter, ModelDrafter)
        num_lanes = len(method.contexts) * target.num_lanes if is_model else target.num_lanes
        # What it catches up on in one forward is written there as well.
        columns = num_lanes * (max_context_tokens + max(tree.max_frontier_nodes, WIDEST) + 3)
        for device, num_bytes in drafter_column.items():
            sizes[device] += columns * num_bytes
    num_nodes = 1 if isinstance(method.drafter, NoDrafter) else tree.max_nodes
    sizes[target.device] += LOGIT_COPIES * num_nodes * target.num_lanes * target.vocab_size * 4
    return sizes


def usable_bytes(pool: EnginePool, device: torch.device) -> int:
    """What of a device one of the pool's actors may fill with slots."""
    return backend_for(device).usable_bytes(device, pool.num_gpus, pool.max_size)


def _drafter_column(drafter: TargetModel | EagleNetwork | MedusaHeads | None) -> dict[torch.device, int]:
    """Of a drafter with memory of its own; heads without one take next to nothing."""
    if drafter is None or isinstance(drafter, MedusaHeads):
        return {}
    decoder = drafter if isinstance(drafter, EagleNetwork) else drafter.decoder
    return position_bytes(decoder, drafter.hidden_size)
