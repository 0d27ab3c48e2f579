"""Run chosen nodes of a tree forward as one packed row, so that layers compute no other nodes.

Attention needs nodes by row: it unpacks queries, keys and values and packs its output. Everything else in a layer is
computed per node. Nodes that are not chosen write keys and values of a chosen one, which no chosen node reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """T packed nodes of r rows and N nodes: `source` (T,) is the place row · N + node of each packed node, `packed`
    (r, N) the packed place of each node, 0 for nodes that are not packed."""

    source: Tensor
    packed: Tensor

    @staticmethod
    def of(chosen: Tensor, num: int) -> Packing:
        """Pack `num` nodes: those marked by `chosen` (r, N) first, then others, both in row order.

        At most `num` nodes may be chosen.
        """
        flat = chosen.flatten()
        source = (~flat).to(torch.uint8).argsort(stable=True)[:num]
        places = torch.zeros_like(flat, dtype=torch.long).scatter_(0, source, torch.arange(num, device=flat.device))
        return Packing(source, places.view_as(chosen))

    def pack(self, values: Tensor) -> Tensor:
        """Return values of nodes (r, N, …) as (1, T, …)."""
        return values.flatten(0, 1)[self.source][None]

    def pack_positions(self, positions: Tensor) -> Tensor:
        """Return positions (…, r, N) as (…, 1, T)."""
        return positions.flatten(-2)[..., self.source].unsqueeze(-2)

    def unpack(self, values: Tensor) -> Tensor:
        """Return packed values (1, T, …) as (r, N, …); nodes that are not packed have those of a packed one."""
        return values[0][self.packed]

    def unpack_heads(self, values: Tensor) -> Tensor:
        """Return packed queries, keys or values (1, H, T, D_h) as (r, H, N, D_h)."""
        return values[0].transpose(0, 1)[self.packed].transpose(1, 2)

    def to(self, device: torch.device) -> Packing:
        """Return a copy for layers on another device."""
        return Packing(self.source.to(device), self.packed.to(device))
