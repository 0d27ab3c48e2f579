"""Place the layers of a model on several devices, and move tensors between devices in a forward.

The first device holds all parts other than layers (embeddings, vision, norm, head), and every forward begins and ends
there: only the layers, their KV cache and this module use other devices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.backends.attention import AttentionStep


def balance(first_bytes: int, layer_bytes: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Return the device index of each layer such that the largest number of bytes on a device is minimal.

    The first device holds `first_bytes` in addition to its layers. Each device has consecutive layers, so a forward
    moves from each device to the next once.
    """
    lowest, highest = max(first_bytes, *layer_bytes), first_bytes + sum(layer_bytes)
    sizes = range(lowest, highest + 1)
    smallest = sizes[bisect_left(sizes, True, key=lambda size: _fill(first_bytes, layer_bytes, size)[-1] < num_devices)]
    return _fill(first_bytes, layer_bytes, smallest)


def _fill(first_bytes: int, layer_bytes: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the device index of each layer if each device is filled up to `size` bytes before the next."""
    index, num_used, indices = 0, first_bytes, []
    for needed in layer_bytes:
        if num_used + needed > size:
            index, num_used = index + 1, 0
        num_used += needed
        indices.append(index)
    return tuple(indices)


def spread(model: nn.Module, decoder: nn.Module, devices: Sequence[torch.device], reserved_bytes: int = 0) -> None:
    """Move a model to several devices; other models use `reserved_bytes` of the first device."""
    layers: nn.ModuleList = decoder.layers  # type: ignore[assignment]
    sizes = [num_bytes(layer) for layer in layers]
    indices = balance(reserved_bytes + num_bytes(model) - sum(sizes), sizes, len(devices))
    for layer, index in zip(layers, indices, strict=True):
        layer.to(devices[index])
    decoder.layers = nn.ModuleList()  # so that only the other modules move; the order of modules is kept
    model.to(devices[0])
    decoder.layers = layers
    connect(list(layers), [devices[index] for index in indices], devices[0])


def connect(layers: Sequence[nn.Module], devices: Sequence[torch.device], first: torch.device) -> None:
    """Register hooks that move inputs to the device of each layer, and the last layer's output to `first`."""

    def fetch(device: torch.device, _layer: nn.Module, args: Any, kwargs: Any) -> Any:
        return moved(args, device), moved(kwargs, device)

    for layer, device in zip(layers, devices, strict=True):
        layer.register_forward_pre_hook(partial(fetch, device), with_kwargs=True)
    layers[-1].register_forward_hook(lambda _layer, _args, output: moved(output, first))


def moved(value: Any, device: torch.device) -> Any:
    """Return `value` with all tensors in nested dicts, tuples and attention steps moved to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, AttentionStep):
        return value.on(device)
    if isinstance(value, dict):
        return {name: moved(part, device) for name, part in value.items()}
    return tuple(moved(part, device) for part in value) if isinstance(value, tuple) else value


def num_bytes(module: nn.Module) -> int:
    """Return the bytes of parameters and buffers, each of which is counted once."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
