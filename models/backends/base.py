"""The backend interface and its reference implementation in plain torch, which runs on any device.

A backend holds every decision that depends on the device: kernels, compilation, capture, synchronization and memory.
Algorithms call it and never ask for a device type. Other backends (`models.backends.cpu`, `models.backends.cuda`)
return the same numbers; `tests/models/backends/test_equality.py` compares them. `models.backends.select` chooses one.

Shapes: r rows, b slots, N nodes, M scratch positions, V vocabulary, D_h head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.backends.attention import AttentionStep, mask_bias, tree_mask
from models.backends.cache import RaggedCache
from models.backends.forward import DecoderRunner
from models.backends.host_copy import HostCopy, PackedCopy
from models.backends.memory import free_bytes

MAX_PREFILL_PADDING = 256
"""Padding positions at which a prefill group is closed: about the cost of one more forward."""


@dataclass(frozen=True)
class TreeNodes:
    """The new nodes of one tree forward, by row.

    `cache` and `window`: KV cache and the number of its leading positions that may be read. `lens`, `delta` (r,):
    committed positions, and the difference between rotary position and KV position. `depth` (r, N) and `visible`
    (r, N, M): tree depth, and the scratch positions that each node reads. `numbers` (N,) are the nodes' own scratch
    positions, `offset`, `offset` + 1, … `num_heads` counts query heads; states are of `dtype`.
    """

    cache: RaggedCache
    rows: Tensor
    lens: Tensor
    delta: Tensor
    depth: Tensor
    visible: Tensor
    numbers: Tensor
    offset: int
    window: int
    num_heads: int
    dtype: torch.dtype


class ChainVerdict(NamedTuple):
    """Greedy verification of a chain. `path` (b, N) node numbers, 0 after the last; `num_taken` (b,) nodes of the path,
    the root included; `next_token` (b,) the target's token after the last node."""

    path: Tensor
    num_taken: Tensor
    next_token: Tensor


class SideStream:
    """Work beside the stream of the decoding steps. This one runs in place: work is complete when the call returns."""

    def use(self) -> AbstractContextManager[object]:
        """Launch the calling thread's work on this stream within the block."""
        return nullcontext()

    def record_event(self) -> Any:
        """An event that completes with all work launched so far; None if that work is complete."""
        return None

    def is_complete(self, event: Any) -> bool:
        """Whether an event completed."""
        return True

    def hand_over(self, event: Any, tensors: Sequence[Tensor]) -> None:
        """Let the calling thread's stream read tensors that were made here before `event`."""


class Backend:
    """Plain torch on one kind of device."""

    name = "reference"
    is_asynchronous = True
    """Whether kernels run while the host continues. Steps are then read one step late, and prompts are prefetched."""
    max_slots = 32
    """Slots beyond which more of them do not pay."""
    usable_share = 0.5
    """Share of free memory for slots; prefills, vision towers and other processes use the rest."""

    def compile(self, decoder: nn.Module) -> DecoderRunner | None:
        """A runner with compiled layers; None if this decoder is not compiled here."""
        return None

    def capture(self, decoder: nn.Module) -> DecoderRunner | None:
        """A runner that replays captured steps; None if this decoder cannot be captured here."""
        return None

    def place(self, nodes: TreeNodes) -> tuple[AttentionStep, Tensor]:
        """KV positions and visibility of the new nodes of a tree forward, and their rotary positions (r, N)."""
        cache_positions, positions = node_positions(nodes)
        bias = mask_bias(tree_mask(nodes.lens, nodes.visible, nodes.window), nodes.dtype)
        return AttentionStep(nodes.cache, nodes.rows, cache_positions, bias, nodes.window, len(nodes.rows)), positions

    def cut_chain(self, best: Tensor, max_depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """End each chain of drafts before the first one without a finite score or below `max_depth` (b,).

        `best` (b, N) fp32 are the scores of the drafts; the root's is finite. Returns valid nodes (b, N), the number of
        valid drafts (b,), and which rows have NaN or +inf scores (b,).
        """
        depth = torch.arange(best.shape[1], device=best.device)
        valid = (best.abs() < torch.inf).cumprod(dim=1).bool() & (depth <= max_depth[:, None])
        return valid, valid.sum(dim=1) - 1, ~(best < torch.inf).all(dim=1)

    def verify_chain(self, logits: Tensor, tokens: Tensor, valid: Tensor) -> ChainVerdict:
        """Follow the argmax of `logits` (b, N, V) down the chain `tokens`, `valid` (b, N), as far as it matches."""
        choice = logits.argmax(dim=-1)
        match = (tokens[:, 1:] == choice[:, :-1]) & valid[:, 1:]
        num_drafts = match.cumprod(dim=1).sum(dim=1, keepdim=True)
        numbers = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        path = torch.where(numbers <= num_drafts, numbers, 0)
        return ChainVerdict(path, num_drafts[:, 0] + 1, choice.gather(1, num_drafts)[:, 0])

    def copy_to_host(self, parts: Sequence[Tensor | None]) -> HostCopy:
        """Start the one copy of a step's results to the host."""
        return PackedCopy(parts)

    def synchronize(self, device: torch.device) -> None:
        """Wait for all work on a device."""
        torch.accelerator.synchronize(device)

    def side_stream(self, device: torch.device) -> SideStream:
        """A stream beside the one of the decoding steps."""
        return SideStream()

    def prefill_limits(self, max_tokens: int | None) -> tuple[int | None, int]:
        """Positions of one prefill forward at most, and padding positions of one group at most."""
        return max_tokens, MAX_PREFILL_PADDING

    def free_bytes(self, device: torch.device) -> int:
        """Bytes that this process can still allocate on a device."""
        return free_bytes()

    def usable_bytes(self, device: torch.device, gpu_share: float, num_processes: int) -> int:
        """Bytes of a device for the slots of one of `num_processes` actors, each with `gpu_share` GPUs."""
        return int(self.usable_share * self.free_bytes(device) / num_processes)

    def refuse_quantization(self, kind: str, dtype: torch.dtype) -> str | None:
        """Why `kind` ("int8" or "fp8") weights with inputs of `dtype` are refused here; None if they are not."""
        return None

    def describe(self, device: torch.device) -> str:
        """The processor's name, for provenance."""
        return device.type


def node_positions(nodes: TreeNodes) -> tuple[Tensor, Tensor]:
    """KV positions and rotary positions of the new nodes, (r, N) each."""
    return nodes.lens[:, None] + nodes.numbers, (nodes.lens + nodes.delta)[:, None] + nodes.depth


REFERENCE = Backend()
