"""Define the backend interface and its reference implementation in plain torch, which runs on any device.

A backend makes every decision that depends on the device; algorithms never check the device type. Other backends return
the same numbers, which `tests/models/backends/test_equality.py` compares. `models.backends.select` chooses one.

Shapes: r rows, b slots, N nodes, M scratch positions, V vocabulary, D_h head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.backends.attention import AttentionStep, DecoderRunner, mask_bias, tree_mask
from models.backends.cache import RaggedCache
from models.backends.host_copy import HostCopy, PackedCopy
from models.backends.mask_rules import LayerRule, TreePositions, masked_rules
from models.backends.memory import free_bytes
from models.backends.recorder import KernelRecorder

MAX_PREFILL_PADDING = 256
"""Maximum number of padding positions of one prefill group; more would cost about as much as another forward."""


@dataclass(frozen=True)
class TreeNodes:
    """New nodes of one tree forward over r cache rows.

    `cache` and `window`: KV cache and the number of its leading positions that may be read. `lens`, `delta` (r,):
    committed positions, and the difference between rotary position and KV position. `depth` (r, N) and `visible`
    (r, N, M): tree depth, and the scratch positions that each node reads. `numbers` (N,) are the nodes' own scratch
    positions, `offset`, `offset` + 1, … `num_heads` counts query heads; `dtype` is that of hidden states. `leading` is
    whether `rows` are the first rows of the cache in order.
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
    leading: bool = True


class ChainVerdict(NamedTuple):
    """Result of greedy chain verification: `choice` (b, N) the target's token after each node; `path` (b, N) accepted
    node numbers, padded with 0; `num_taken` (b,) their number, the root included; `next_token` (b,) the target's token
    after the last accepted node."""

    choice: Tensor
    path: Tensor
    num_taken: Tensor
    next_token: Tensor


class SideStream:
    """A stream for work beside decoding steps. This base class is synchronous: calls return when work is complete."""

    def use(self) -> AbstractContextManager[object]:
        """Launch the calling thread's kernels on this stream within a `with` block."""
        return nullcontext()

    def record_event(self) -> Any:
        """Record an event that completes with all work launched so far; returns None if that work is complete."""
        return None

    def is_complete(self, event: Any) -> bool:
        """Return whether the work before an event of `record_event` is complete."""
        return True

    def hand_over(self, event: Any, tensors: Sequence[Tensor]) -> None:
        """Make the caller's current stream wait for `event`, before which `tensors` were computed on this stream."""


class Backend:
    """Reference backend in plain torch; subclasses override methods for one device type."""

    name = "reference"
    is_asynchronous = True
    """Whether kernels run asynchronously. If so, outputs are processed one step late and prompts are prefetched."""
    prefill_steps = 0.0
    """Time of a small prefill in decoding steps, if it does not depend on the number of prompts; see
    `decoding.scheduling.admission.Refill`."""
    max_slots = 32
    """Maximum number of slots of an engine; more do not raise throughput."""
    usable_share = 0.5
    """Share of free memory for slots; the rest is for prefills, vision towers and other processes."""

    def compile(self, decoder: nn.Module) -> DecoderRunner | None:
        """Return a runner with compiled layers; None if this backend does not compile this decoder."""
        return None

    def capture(self, decoder: nn.Module, fuses: bool = False) -> DecoderRunner | None:
        """Return a runner that replays steps as CUDA graphs; None if this backend cannot capture this decoder.

        With `fuses`, it compiles the layers that it captures, if they have equal structure.
        """
        return None

    def step_recorder(self, device: torch.device) -> KernelRecorder | None:
        """Return a recorder of whole decoding steps; None if this backend launches them kernel by kernel."""
        return None

    def reads_rows(self, cache: RaggedCache) -> bool:
        """Return whether attention over a cache reads rows by number, each up to its length; otherwise it reads a
        window of the leading rows, whose size changes between steps."""
        return False

    def autocast(self, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Run GEMMs and attention of fp32 weights in `dtype` within a `with` block; fp32 changes nothing."""
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def place(self, nodes: TreeNodes) -> tuple[AttentionStep, Tensor]:
        """Return the attention step of a tree forward (KV positions and mask), and rotary positions (r, N)."""
        cache_positions, positions = node_positions(nodes)
        bias = mask_bias(tree_mask(nodes.lens, nodes.visible, nodes.window), nodes.dtype)
        num_leading = len(nodes.rows) if nodes.leading else None
        step = AttentionStep(
            nodes.cache, nodes.rows, cache_positions, bias, nodes.window, num_leading, masks=rule_masks(nodes)
        )
        return step, positions

    def cut_chain(self, best: Tensor, max_depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """End each chain before the first draft with a non-finite score or a depth above `max_depth` (b,).

        `best` (b, N) fp32 are the scores of the nodes; the root's is finite. Returns which nodes are valid (b, N), the
        number of valid drafts (b,), and which rows have NaN or +inf scores (b,).
        """
        depth = torch.arange(best.shape[1], device=best.device)
        valid = (best.abs() < torch.inf).cumprod(dim=1).bool() & (depth <= max_depth[:, None])
        return valid, valid.sum(dim=1) - 1, ~(best < torch.inf).all(dim=1)

    def verify_chain(self, logits: Tensor, tokens: Tensor, valid: Tensor) -> ChainVerdict:
        """Accept drafts of the chain `tokens`, `valid` (b, N) while they match the argmax of `logits` (b, N, V)."""
        choice = logits.argmax(dim=-1)
        match = (tokens[:, 1:] == choice[:, :-1]) & valid[:, 1:]
        num_drafts = match.cumprod(dim=1).sum(dim=1, keepdim=True)
        numbers = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        path = torch.where(numbers <= num_drafts, numbers, 0)
        return ChainVerdict(choice, path, num_drafts[:, 0] + 1, choice.gather(1, num_drafts)[:, 0])

    def copy_to_host(self, parts: Sequence[Tensor | None], packed: Tensor | None = None) -> HostCopy:
        """Start copying a step's results to the host, as one tensor: `packed` if they are packed already."""
        return PackedCopy(parts, packed)

    def copy_to_device(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        """Return int64 `numbers` on a device; does not wait for work that was launched before."""
        return torch.tensor(numbers, dtype=torch.long, device=device)

    def synchronize(self, device: torch.device) -> None:
        """Block until all work on a device is complete."""
        torch.accelerator.synchronize(device)

    def side_stream(self, device: torch.device) -> SideStream:
        """Create a stream for work beside the decoding steps."""
        return SideStream()

    def prefill_limits(self, max_tokens: int | None) -> tuple[int | None, int]:
        """Return the most positions of one prefill forward, and the most padding positions of one group."""
        return max_tokens, MAX_PREFILL_PADDING

    def free_bytes(self, device: torch.device) -> int:
        """Return the bytes that this process can still allocate on a device."""
        return free_bytes()

    def usable_bytes(self, device: torch.device, gpu_share: float, num_processes: int) -> int:
        """Return the bytes for slots of one of `num_processes` actors on a device, each with `gpu_share` GPUs."""
        return int(self.usable_share * self.free_bytes(device) / num_processes)

    def refuse_quantization(self, kind: str, dtype: torch.dtype) -> str | None:
        """Return why `kind` ("int8" or "fp8") weights and inputs of `dtype` are refused; None if they are supported."""
        return None

    def describe(self, device: torch.device) -> str:
        """Return the name of the CPU or GPU, for provenance."""
        return device.type


def node_positions(nodes: TreeNodes) -> tuple[Tensor, Tensor]:
    """Return the KV positions and the rotary positions of the new nodes, (r, N) each."""
    # Nodes behind the last position, which are padding, are written where nothing reads.
    return (nodes.lens[:, None] + nodes.numbers).clamp_max(nodes.cache.capacity), (nodes.lens + nodes.delta)[
        :, None
    ] + nodes.depth


def rule_masks(nodes: TreeNodes) -> dict[LayerRule, Tensor]:
    """Return the masks (r, 1, N, window), added to the scores, of the rules of layers that hide earlier positions."""
    rules = masked_rules(nodes.cache.rules)
    if not rules:
        return {}
    places = TreePositions.of(nodes.lens, nodes.depth, nodes.visible)
    masks = {rule: places.mask(rule, nodes.lens, nodes.visible, nodes.window) for rule in rules}
    return {rule: mask_bias(mask, nodes.dtype) for rule, mask in masks.items()}


REFERENCE = Backend()
