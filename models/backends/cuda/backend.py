"""Run models on NVIDIA GPUs: CUDA graphs, a tree attention kernel, asynchronous output processing, prompt prefetch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from models.backends.attention import AttentionStep, DecoderRunner
from models.backends.base import Backend, SideStream, TreeNodes, node_positions
from models.backends.cache import RaggedCache
from models.backends.cuda.graphs import CapturedDecoder, CudaRecorder
from models.backends.cuda.tree_attention import TreeAttention, TreeKernel, kernel_for
from models.backends.host_copy import HostCopy, PackedCopy
from models.backends.recorder import KernelRecorder


class CudaBackend(Backend):
    """Backend for one or more NVIDIA GPUs."""

    name = "cuda"
    prefill_steps = 2.0
    max_slots = 256
    usable_share = 0.85

    def __init__(self) -> None:
        self._kernels: weakref.WeakKeyDictionary[RaggedCache, TreeKernel | None] = weakref.WeakKeyDictionary()

    def capture(self, decoder: nn.Module, fuses: bool = False) -> DecoderRunner | None:
        """See `Backend.capture`; returns None for a decoder on several devices."""
        devices = {parameter.device for parameter in decoder.parameters()}
        if len(devices) > 1:
            return None
        return CapturedDecoder(decoder, CudaRecorder(devices.pop()), fuses)

    def place(self, nodes: TreeNodes) -> tuple[AttentionStep, Tensor]:
        """See `Backend.place`; uses the tree kernel if it supports the cache."""
        kernel = self._kernel_of(nodes.cache)
        if kernel is None:
            return super().place(nodes)
        cache_positions, positions = node_positions(nodes)
        rows, lens = nodes.rows, nodes.lens.to(torch.int32)
        trees = TreeAttention(kernel, nodes.cache.blocks(rows), lens, nodes.visible.to(torch.uint8).contiguous())
        num_leading = len(rows) if nodes.leading else None
        step = AttentionStep(nodes.cache, rows, cache_positions, None, nodes.window, num_leading, kernel=trees)
        return step, positions

    def step_recorder(self, device: torch.device) -> KernelRecorder | None:
        return CudaRecorder(device)

    def reads_rows(self, cache: RaggedCache) -> bool:
        """See `Backend.reads_rows`; the tree kernel does."""
        return self._kernel_of(cache) is not None

    def _kernel_of(self, cache: RaggedCache) -> TreeKernel | None:
        """Return the tree kernel for a cache; None if attention must use a mask, or before the first write."""
        if cache.is_made and cache not in self._kernels:
            memories: list[Sequence[Tensor | None]] = [cache.keys, cache.values]
            if cache.states is not None:
                # Layers without attention have no keys and values.
                memories = [[memory for memory in each if memory is not None] for each in memories]
            self._kernels[cache] = kernel_for(*memories) if memories[0] else None
        return self._kernels.get(cache)

    def copy_to_host(self, parts: Sequence[Tensor | None], packed: Tensor | None = None) -> HostCopy:
        return PinnedCopy(parts, packed)

    def copy_to_device(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        """See `Backend.copy_to_device`; a copy from pageable memory would wait for the current stream."""
        return torch.tensor(numbers, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)

    def side_stream(self, device: torch.device) -> SideStream:
        return CudaSideStream(device)

    def free_bytes(self, device: torch.device) -> int:
        """See `Backend.free_bytes`; unused blocks of the caching allocator count as free."""
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))

    def usable_bytes(self, device: torch.device, gpu_share: float, num_processes: int) -> int:
        """See `Backend.usable_bytes`; actors that share a GPU may not have allocated anything yet."""
        free = self.free_bytes(device)
        if 0 < gpu_share < 1:
            _, total = torch.cuda.mem_get_info(device)
            free = min(free, int(gpu_share * total) - torch.cuda.memory_allocated(device))
        return max(0, int(self.usable_share * free))

    def describe(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)


class PinnedCopy(PackedCopy):
    """Packed copy into pinned host memory, which runs asynchronously while further steps are launched."""

    def __init__(self, parts: Sequence[Tensor | None], packed: Tensor | None = None) -> None:
        super().__init__(parts, packed)
        pinned = torch.empty(self.numbers.shape, dtype=self.numbers.dtype, pin_memory=True)
        pinned.copy_(self.numbers, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(self.numbers.device))
        self.numbers = pinned

    def read(self) -> list[Any]:
        self._event.synchronize()
        return super().read()


class CudaSideStream(SideStream):
    """CUDA stream for prompts, beside the stream of the decoding steps."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The current stream may still be copying weights.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def use(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record_event(self) -> Any:
        return self._stream.record_event()

    def is_complete(self, event: Any) -> bool:
        return bool(event.query())

    def hand_over(self, event: Any, tensors: Sequence[Tensor]) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(event)
        for tensor in tensors:
            # Keeps the allocator from reusing the memory while the caller's stream still reads it.
            tensor.record_stream(current)
