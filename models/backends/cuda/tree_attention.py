"""Compute tree attention in two parts, over committed and over scratch positions, and merge them by log-sum-exp.

Flash attention takes no mask, and only the few scratch positions need one. The first part, over committed positions,
runs the flash kernel with a length per row; the second part, nodes × scratch positions, is computed here with a mask.
If a row has a single node, its own position belongs to the first part. The merge is in fp32.

Shapes: r rows, H_kv key heads, G query heads per key head, N nodes, M scratch positions, C cache positions, D_h head
size. The G · N queries of a key head are one block, so that K and V are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from models.backends.attention import AttentionStep

MAX_HEAD_SIZE = 256
MIN_CAPABILITY = (8, 0)
"""Lowest compute capability (Ampere) for which the flash kernel is compiled."""


@dataclass(frozen=True)
class TwoParts:
    """Lengths, mask and offsets of the two-part attention of one forward, computed once for all layers.

    `lens` (r, H_kv) int32 counts the positions of the first part. `bias` (r, 1, G · N, M) fp32 is 0 for visible
    positions and −inf elsewhere, None for a single node. `scratch` (r, M) are the KV positions of the second part, None
    if these are the nodes' own. `query_starts` and `key_starts` (r · H_kv + 1,) int32 are the offsets of each row and
    head in the flattened queries and in the flattened cache.
    """

    first: FirstPart
    lens: Tensor
    bias: Tensor | None
    scratch: Tensor | None
    query_starts: Tensor
    key_starts: Tensor

    def on(self, device: torch.device) -> TwoParts:
        """Return a copy for layers on another device."""
        moved: Any = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def idle(self, num_rows: int) -> TwoParts:
        """Return buffers of the same sizes for `num_rows` rows, with `lens` 0, so no committed position is read."""
        num_blocks = num_rows * self.lens.shape[1] + 1
        blocks = torch.arange(num_blocks, device=self.lens.device, dtype=torch.int32)
        lens, bias, scratch = (
            None if part is None else part.new_zeros((num_rows, *part.shape[1:]))
            for part in (self.lens, self.bias, self.scratch)
        )
        assert lens is not None
        return TwoParts(self.first, lens, bias, scratch, blocks * self.query_starts[1], blocks * self.key_starts[1])

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, step: AttentionStep, scale: float
    ) -> Tensor:
        """See `models.backends.attention.AttentionKernel`."""
        step.cache.write(layer, step.rows, step.columns, key, value)
        keys, values = step.cache.layer(layer)
        return attend_in_parts(query, key, value, step.rows, keys, values, self, scale).transpose(1, 2)

    @property
    def changing(self) -> list[Tensor]:
        """Tensors (r, …) that differ between forwards of one size; CUDA graphs copy them into static buffers."""
        return [part for part in (self.lens, self.bias, self.scratch) if part is not None]


FirstPart = Callable[[Tensor, Tensor, Tensor, TwoParts, float], tuple[Tensor, Tensor]]
"""Attention without a mask: queries (r, H_kv, G · N, D_h), cached K and V (r, H_kv, C, D_h), the parts, the scale →
output like the queries and log-sum-exp (r, H_kv, G · N) fp32, which is −inf for rows of length 0."""


def flash(query: Tensor, keys: Tensor, values: Tensor, parts: TwoParts, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the first part with torch's flash attention; see `FirstPart` for arguments and results.

    Each row and key head is passed as a sequence with one head, so that the cache is viewed and not copied.
    `torch.nn.attention.varlen` calls the same operation, but does not take lengths before torch 2.13.
    """
    run: Any = _flash_in_graphs if torch.compiler.is_compiling() else _flash
    mixed, total = run(query, keys, values, parts.query_starts, parts.key_starts, parts.lens, scale)
    # The kernel returns +inf for empty sums.
    return mixed, torch.nan_to_num(total, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)


def _flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    lens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    head_dim = query.shape[3]
    mixed, total, *_ = torch.ops.aten._flash_attention_forward(
        query.reshape(-1, 1, head_dim),
        keys.view(-1, 1, head_dim),
        values.view(-1, 1, head_dim),
        query_starts,
        key_starts,
        query.shape[2],
        keys.shape[2],
        0.0,
        False,
        False,
        scale=scale,
        seqused_k=lens.view(-1),
    )
    return mixed.view(query.shape), total.view(query.shape[:3])


_flash_in_graphs = torch.library.custom_op("draftfleet::flash", _flash, mutates_args=())
"""The same call as one operation of a compiled graph, which the compiler does not look into."""


@_flash_in_graphs.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        query.shape[:3], dtype=torch.float32
    )


def first_part(keys: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> FirstPart | None:
    """Return the kernel for a KV cache with these `keys` and `values`; None if attention must use a mask instead."""
    memories = [memory for memory in (*keys, *values) if memory is not None]
    # One split serves all layers.
    are_alike = len({memory.shape for memory in memories}) == 1 and len(memories) == 2 * len(keys)
    return flash if are_alike and all(map(_has_flash, memories)) else None


def _has_flash(memory: Tensor) -> bool:
    """Return whether the flash kernel supports a layer's cache (rows, H_kv, C, D_h); its offsets are 32 bits wide."""
    return (
        memory.device.type == "cuda"
        and memory.dtype in (torch.float16, torch.bfloat16)
        and memory.shape[3] % 8 == 0
        and memory.shape[3] <= MAX_HEAD_SIZE
        and memory.shape[:3].numel() < 2**31
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(memory.device) >= MIN_CAPABILITY
    )


def split(first: FirstPart, lens: Tensor, visible: Tensor, offset: int, memory: Tensor, num_heads: int) -> TwoParts:
    """Prepare both parts of a forward of N nodes that begin at scratch position `offset`.

    `lens` (r,), `visible` (r, N, M), `memory` (rows, H_kv, C, D_h) of any layer, `num_heads` query heads.
    """
    num_rows, num_nodes, num_scratch = visible.shape
    num_key_heads, num_columns = memory.shape[1:3]
    group = num_heads // num_key_heads
    blocks = torch.arange(num_rows * num_key_heads + 1, device=lens.device, dtype=torch.int32)
    is_alone = num_nodes == num_scratch == 1
    bias = scratch = None
    if not is_alone:
        bias = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)
        bias = bias[:, None].expand(-1, group, -1, -1).reshape(num_rows, 1, group * num_nodes, num_scratch)
        if offset > 0 or num_scratch != num_nodes:
            scratch = lens[:, None] + torch.arange(num_scratch, device=lens.device)
            # Invisible scratch positions may be beyond the cache, whose last position holds writes of unused rows.
            scratch = scratch.clamp_max(num_columns - 2)
    used = (lens + 1 if is_alone else lens).to(torch.int32)[:, None].expand(-1, num_key_heads).contiguous()
    return TwoParts(first, used, bias, scratch, blocks * (group * num_nodes), blocks * num_columns)


def attend_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    parts: TwoParts,
    scale: float,
) -> Tensor:
    """Compute both parts and merge them: `query` (r, H, N, D_h) → attention output (r, H, N, D_h).

    The nodes' own `key` and `value` (r, H_kv, N, D_h) are already written to `rows` (r,), the first r, of the cache
    `keys` and `values` (rows, H_kv, C, D_h). With s the scores of scratch positions and ℓ the log-sum-exp of the first
    part, softmax over (ℓ, s) weighs the first part's output and the scratch values as one softmax over all would.
    """
    num_rows, num_heads, num_nodes, head_dim = query.shape
    num_key_heads = keys.shape[1]
    query = query.reshape(num_rows, num_key_heads, -1, head_dim)
    mixed, total = parts.first(query, keys[:num_rows], values[:num_rows], parts, scale)
    if parts.bias is not None:
        if parts.scratch is not None:
            key, value = (memory[rows[:, None], :, parts.scratch].transpose(1, 2) for memory in (keys, values))
        scores = torch.add(parts.bias, query.float() @ key.float().transpose(2, 3), alpha=scale)
        weights = torch.cat([total[..., None], scores], dim=-1).softmax(dim=-1)
        mixed = torch.addcmul(weights[..., 1:] @ value.float(), weights[..., :1], mixed.float()).to(query.dtype)
    return mixed.reshape(num_rows, num_heads, num_nodes, head_dim)
