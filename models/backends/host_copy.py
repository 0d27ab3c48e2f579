"""Copy a step's results to the host as one packed tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

KINDS: dict[torch.dtype, Callable[[float], Any]] = {torch.long: int, torch.bool: bool}


class HostCopy(Protocol):
    """Copy of a step's results to the host, possibly not complete."""

    def read(self) -> list[Any]:
        """Return the parts as nested lists of numbers, None for None; waits for this copy and for no later work."""
        ...


class ReadCopy:
    """Complete copy of CPU tensors. Values are read at construction, before later steps overwrite views."""

    def __init__(self, parts: Sequence[Tensor | None]) -> None:
        self._lists = [None if part is None else part.tolist() for part in parts]

    def read(self) -> list[Any]:
        """See `HostCopy.read`."""
        return self._lists


class PackedCopy:
    """Parts (b,) or (b, P) packed into one device tensor, which `read` copies to the host."""

    def __init__(self, parts: Sequence[Tensor | None]) -> None:
        self._parts = tuple(parts)
        self.numbers = pack(parts)

    def read(self) -> list[Any]:
        """See `HostCopy.read`."""
        return unpack(self.numbers, self._parts)


def pack(parts: Sequence[Tensor | None]) -> Tensor:
    """Concatenate all parts in one flat fp64 tensor, which holds token ids, counts and fp32 numbers exactly."""
    first, *rest = (part.flatten() for part in parts if part is not None)
    return torch.cat([first.double(), *rest])


def unpack(numbers: Tensor, parts: Sequence[Tensor | None]) -> list[Any]:
    """Convert packed numbers to nested lists with the shapes and types of `parts`."""
    values, start = numbers.tolist(), 0
    lists: list[Any] = []
    for part in parts:
        lists.append(None if part is None else _as_lists(values[start : start + part.numel()], part))
        start += 0 if part is None else part.numel()
    return lists


def _as_lists(values: list[float], like: Tensor) -> list[Any]:
    kind = KINDS.get(like.dtype)
    typed = values if kind is None else list(map(kind, values))
    if like.dim() == 1:
        return typed
    width = like.shape[1]
    return [typed[start : start + width] for start in range(0, len(typed), width)]
