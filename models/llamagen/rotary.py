"""Compute 2D rotary positions: half of a head's pairs rotate by the row of a code, half by its column.

Files interleave the pairs of a head (2i, 2i + 1); transformers' layers rotate dimension i with i + D_h / 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GridRotary(nn.Module):
    """Cosines and sines for `num_condition_tokens` condition positions, then `grid` × `grid` codes in raster order.

    Condition positions have zeros for both, which is not the identity, because the published weights were trained this
    way. Positions after the image have zeros as well.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, grid: int, num_condition_tokens: int, base: float = 10000.0) -> None:
        super().__init__()
        self.head_dim, self.grid, self.base = head_dim, grid, base
        self.num_condition_tokens = num_condition_tokens
        cos, sin = self._tables()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Look up cos and sin (r, N, D_h) of positions (r, N) for `rotate_half`, in the dtype of `x`."""
        index = position_ids.clamp(0, self.cos.shape[0] - 1)
        return self.cos[index].to(x.dtype), self.sin[index].to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # A dtype change rounds buffers, so they are computed again.
        self.cos, self.sin = (table.to(self.cos.device) for table in self._tables())
        return moved

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Compute both tables (num_condition_tokens + grid² + 1, D_h) in fp32 on the CPU, even under a meta device."""
        half = self.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device="cpu")[: half // 2] / half
        frequencies = 1.0 / self.base**exponents
        side = torch.outer(torch.arange(self.grid, device="cpu"), frequencies)
        rows = side[:, None].expand(-1, self.grid, -1)
        columns = side[None].expand(self.grid, -1, -1)
        angles = torch.cat([rows, columns, rows, columns], dim=-1).flatten(0, 1)
        zeros = (0, 0, self.num_condition_tokens, 1)
        return F.pad(angles.cos(), zeros), F.pad(angles.sin(), zeros)


def split_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder rows (H · D_h, …) of a query or key projection from the order of files to that of the layers."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def join_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Invert `split_pairs`."""
    pairs = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
