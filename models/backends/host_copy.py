"""Copy a step's results to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Complete copy of CPU tensors. Values are read at construction, before later steps overwrite views."""

    def __init__(self, parts: Sequence[Tensor | None]) -> None:
        self._lists = [None if part is None else part.tolist() for part in parts]

    def read(self) -> list[Any]:
        """Return the parts as nested lists of numbers, None for None; waits for this copy and for no later work."""
        return self._lists


def pack(parts: Sequence[Tensor | None]) -> Tensor:
    """Return the numbers of all parts as one tensor of type fp64, which holds token ids, counts and fp32 numbers
    exactly."""
    first, *rest = (part.flatten() for part in parts if part is not None)
    return torch.cat([first.double(), *rest])


class PackedCopy(HostCopy):
    """Parts (b,) or (b, P), `packed` into one flat device tensor, which `read` copies to the host."""

    def __init__(self, parts: Sequence[Tensor | None], packed: Tensor | None = None) -> None:
        self._parts = tuple(parts)
        self.numbers = pack(parts) if packed is None else packed

    def read(self) -> list[Any]:
        sizes = [0 if part is None else part.numel() for part in self._parts]
        return [
            None if part is None else values.view(part.shape).to(part.dtype).tolist()
            for part, values in zip(self._parts, torch.split(self.numbers.cpu(), sizes), strict=True)
        ]
