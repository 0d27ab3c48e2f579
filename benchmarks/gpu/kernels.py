"""Times copies, GEMMs, and a captured step's attention by the tree kernel and with one mask.

The kernel's times are withheld if its result differs from the mask's beyond rounding.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.models import SEED, recorder
from benchmarks.gpu.sizes import Heads, Sizes
from benchmarks.harness.clock import seconds_of
from models.backends.attention import AttentionStep, attend, mask_bias, tree_mask
from models.backends.cache import RaggedCache
from models.backends.cuda.graphs import WARM_UPS
from models.backends.cuda.tree_attention import TreeAttention, kernel_for
from models.loading.checkpoints import DTYPES

REPEATS = 10
TOLERANCE_EPS = 8
"""Tolerated difference, in eps of the dtype relative to the largest value."""


def copy_bytes_per_s(sizes: Sizes, device: torch.device) -> float:
    """Return the bytes read and written per second by copies within the device."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / seconds_of(lambda: target.copy_(source), device, REPEATS)


def gemm_flop_per_s(sizes: Sizes, device: torch.device) -> float:
    """Return the floating-point operations per second of a large matrix product in the models' dtype."""
    side, dtype = sizes.gemm_side, DTYPES[sizes.dtype]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return float(2 * side**3 / seconds_of(lambda: left @ right, device, REPEATS))


@torch.inference_mode()
def measure_attention(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Return the microseconds of one layer's attention, both ways, for each head shape and number of nodes."""
    return [
        time_attention(heads, nodes, sizes, device)
        for heads in sizes.attention_heads
        for nodes in sizes.attention_nodes
    ]


def time_attention(heads: Heads, num_nodes: int, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Time attention over rows whose caches are half to completely full, each with a chain of `num_nodes` nodes."""
    dtype, rows = DTYPES[sizes.dtype], sizes.attention_rows
    generator = torch.Generator(device).manual_seed(SEED)

    def states(num_heads: int, length: int) -> Tensor:
        return torch.randn(rows, num_heads, length, heads.size, generator=generator, device=device).to(dtype)

    cache = RaggedCache(rows, sizes.attention_columns, 1, device)
    every = torch.arange(cache.capacity + 1, device=device).repeat(rows, 1)
    numbers = torch.arange(rows, device=device)
    filled = (states(heads.key, cache.capacity + 1), states(heads.key, cache.capacity + 1))
    cache.write(0, cache.locate(numbers, every), *filled)
    lens = torch.linspace(cache.capacity // 2, cache.capacity - num_nodes, rows, device=device).long()
    visible = torch.ones(num_nodes, num_nodes, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)
    columns = lens[:, None] + torch.arange(num_nodes, device=device)
    query, key, value = (states(number, num_nodes) for number in (heads.query, heads.key, heads.key))
    bias = mask_bias(tree_mask(lens, visible, cache.capacity), dtype)
    steps = {"mask": AttentionStep(cache, numbers, columns, bias, cache.capacity, rows)}
    if (kernel := kernel_for(cache.keys, cache.values)) is not None:
        seen = visible.to(torch.uint8).contiguous()
        trees = TreeAttention(kernel, cache.blocks(numbers), lens.to(torch.int32), seen)
        steps["tree_kernel"] = AttentionStep(cache, numbers, columns, None, cache.capacity, rows, kernel=trees)
    layer = nn.Module()
    layer.layer_idx = 0  # type: ignore[assignment]
    row: dict[str, Any] = {**asdict(heads), "nodes": num_nodes, "rows": rows, "columns": cache.capacity}
    mixed = {name: attend(layer, query, key, value, None, lanes=step)[0].float() for name, step in steps.items()}
    if "tree_kernel" in mixed:
        largest = mixed["mask"].abs().max()
        differs = ((mixed["tree_kernel"] - mixed["mask"]).abs().max() / largest).item() / torch.finfo(dtype).eps
        row["difference_eps"] = differs
        # In this form NaN counts as a difference.
        if not differs <= TOLERANCE_EPS:
            row["withheld"] = f"the two ways differ by {differs:.1f} units of {sizes.dtype}'s precision"
            del steps["tree_kernel"]
    else:
        row["withheld"] = "this device or type has no tree kernel"
    for name, step in steps.items():

        def layers(step: AttentionStep = step) -> Tensor:
            for _ in range(sizes.attention_calls):
                out, _ = attend(layer, query, key, value, None, lanes=step)
            return out

        graphs = recorder(device)
        for _ in range(WARM_UPS):
            graphs.run_beside(layers)
        _, replay = graphs.record(layers)
        row[f"{name}_us"] = 1e6 * seconds_of(replay, device, REPEATS) / sizes.attention_calls
    return row
