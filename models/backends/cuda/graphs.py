"""Capture decoding steps of a decoder as CUDA graphs, one per input size, and replay them to save kernel launches.

A CUDA graph reads and writes fixed addresses, so inputs are copied into static buffers of a few sizes: rows and windows
are rounded up, and unused rows write to the KV position after the last readable one. A graph is captured at the first
use of its size.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.backends.attention import AttentionStep, DecoderRunner, run_decoder, some_layers
from models.backends.cache import RaggedCache
from models.backends.cuda.fused_layers import INDUCTOR, fuse
from models.backends.cuda.tree_attention import TreeAttention
from models.backends.layers import NOT_COMPILED, first_lines
from models.backends.mask_rules import LayerRule
from models.backends.recorder import SIZES, KernelRecorder, Out, is_in_whole_step

logger = logging.getLogger(__name__)

WINDOW_STEP = 256
MIN_FUSED_TOKENS = 512
"""Tokens from which a prefill runs fused layers; with fewer it waits for the host, whose calls they do not shorten."""
WARM_UPS = 2
"""Eager runs before a capture, in which libraries choose kernels and allocate workspaces."""


class CudaRecorder:
    """Captures CUDA graphs on one device, see `models.backends.recorder.KernelRecorder`.

    They share a memory pool, because they never run concurrently.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    @property
    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def run_beside(self, run: Callable[[], Out]) -> Out:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            out = run()
        current.wait_stream(self._stream)
        return out

    def record(self, run: Callable[[], Out]) -> tuple[Out, Callable[[], None]]:
        current, graph = torch.cuda.current_stream(self._stream.device), torch.cuda.CUDAGraph()
        try:
            # Kernels of the prompt thread are allowed during a capture and are not captured.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                out = run()
        finally:
            torch.cuda.set_stream(current)  # a failed capture leaves its own
        self._pool = self._pool or graph.pool()
        return out, graph.replay


@dataclass(frozen=True)
class _Inputs:
    """Inputs of one size, which `fill` overwrites: those of a graph have fixed addresses."""

    embeds: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    mask: Tensor | None
    masks: dict[LayerRule, Tensor]
    trees: TreeAttention | None

    def fill(self, embeds: Tensor, positions: Tensor, step: AttentionStep) -> None:
        """Copy the inputs of a forward of at most as many rows."""
        num_inputs, num_rows = embeds.shape[0], step.columns.shape[0]
        # Unused rows write to a position that is never read.
        for buffer, part, unread in zip((self.blocks, self.offsets), step.index, step.cache.unread, strict=True):
            buffer[:num_rows].copy_(part)
            buffer[num_rows:].fill_(unread)
        self.embeds[:num_inputs].copy_(embeds)
        self.positions[..., :num_inputs, :].copy_(positions)
        if step.mask is not None and self.mask is not None:
            for mask, given in ((self.mask, step.mask), *((self.masks[rule], step.masks[rule]) for rule in self.masks)):
                mask[:num_rows, :, :, : step.window].copy_(given)
                mask[:num_rows, :, :, step.window :].fill_(-torch.inf)
        if isinstance(step.kernel, TreeAttention) and self.trees is not None:
            for buffer, part in zip(self.trees.changing, step.kernel.changing, strict=True):
                buffer[:num_rows].copy_(part)
                buffer[num_rows:].fill_(0)

    def step(self, given: AttentionStep, window: int) -> AttentionStep:
        """Return the attention step over these inputs."""
        size, index, rows = self.blocks.shape[0], (self.blocks, self.offsets), self.blocks[:, 0]
        options = {"kernel": self.trees, "index": index, "masks": self.masks}
        return AttentionStep(given.cache, rows, self.offsets, self.mask, window, size, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Recording:
    """CUDA graph of one input size: its inputs, output tensor, and the function that replays it.

    A graph reads addresses and keeps no tensor alive, so every tensor that it reads is held here or by model and cache.
    """

    inputs: _Inputs
    out: Tensor
    replay: Callable[[], None]


class CapturedDecoder(DecoderRunner):
    """Runs a decoder: decoding steps by replay of CUDA graphs, prefills without.

    With `fuses`, steps capture compiled layers, if all have equal structure, and prefills of many tokens run them. If
    compilation fails, a warning is logged, and later forwards run the layers as they are. If a capture fails, such as
    that of experts that are chosen on the host, a warning is logged, and all later forwards run eagerly.
    """

    is_captured = True

    def __init__(
        self, decoder: nn.Module, recorder: KernelRecorder, fuses: bool = False, compiler: str = INDUCTOR
    ) -> None:
        super().__init__(decoder)
        self._recorder = recorder
        self._fused = fuse(decoder, compiler) if fuses else None
        self._has_failed = False
        self._recordings = weakref.WeakKeyDictionary[RaggedCache, dict[tuple[object, ...], _Recording]]()

    def of_layers(self, indices: Sequence[int]) -> DecoderRunner:
        runner = CapturedDecoder(some_layers(self.decoder, indices), self._recorder)
        # The same compiled function runs them.
        runner._fused = None if self._fused is None else some_layers(self._fused, indices)
        runner._has_failed = self._has_failed
        return runner

    @property
    def is_compiled(self) -> bool:  # type: ignore[override]
        return self._fused is not None

    @property
    def mode(self) -> str:  # type: ignore[override]
        if self._has_failed:
            return "eager, capturing failed"
        return "captured" if self._fused is None else "captured, fused"

    @property
    def num_recordings(self) -> int:
        """Number of captured graphs over all KV caches."""
        return sum(len(recordings) for recordings in self._recordings.values())

    def __call__(
        self,
        embeds: Tensor,
        positions: Tensor,
        step: AttentionStep,
        extra: dict[str, Any],
        wanted: Sequence[int] = (),
    ) -> Tensor:
        num_rows, num_nodes = step.columns.shape
        size = next((rows for rows in SIZES if rows >= num_rows), None)
        is_step = not (step.num_leading_rows is None or step.is_prefill) and step.cache.is_made
        if step.is_prefill and step.probe is None and step.cache.is_made and num_rows * num_nodes >= MIN_FUSED_TOKENS:
            return self._run_compiled(embeds, positions, step, extra, wanted)
        if is_step and not self._has_failed and is_in_whole_step():
            # Its rows have a fixed number already.
            return self._run_compiled(embeds, positions, step, extra, wanted)
        if not is_step or size is None or self._has_failed or extra or step.states is not None:
            # Recurrent layers are recorded in whole steps only, because unused rows have no states.
            return run_decoder(self.decoder, embeds, positions, step, extra, wanted)
        size = min(size, step.cache.num_rows)
        window = min(-(-step.window // WINDOW_STEP) * WINDOW_STEP, step.cache.capacity)
        recordings = self._recordings.setdefault(step.cache, {})
        trees = step.kernel if isinstance(step.kernel, TreeAttention) else None
        # The tree kernel has a length per row and does not depend on the window.
        width = ("window", window) if trees is None else ("scratch", trees.visible.shape[2])
        key = (size, num_nodes, positions.dim(), tuple(wanted), width)
        recording = recordings.get(key) or self._record(embeds, positions, step, size, window, wanted)
        if recording is None:
            return run_decoder(self.decoder, embeds, positions, step, extra, wanted)
        recordings[key] = recording
        recording.inputs.fill(embeds, positions, step)
        recording.replay()
        return recording.out[: embeds.shape[0]].clone()

    def _record(
        self,
        embeds: Tensor,
        positions: Tensor,
        step: AttentionStep,
        size: int,
        window: int,
        wanted: Sequence[int],
    ) -> _Recording | None:
        """Return a recording of this size; None if the decoder cannot be captured."""
        inputs = _buffers(embeds, positions, step, size, window)
        try:
            out, replay = self._capture(inputs.embeds, inputs.positions, inputs.step(step, window), wanted)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            logger.warning(
                "steps run eagerly, which is slower: this model cannot be captured: %s", first_lines(error, 1)
            )
            self._has_failed, self._fused = True, None
            return None
        return _Recording(inputs, out, replay)

    def _capture(
        self, embeds: Tensor, positions: Tensor, step: AttentionStep, wanted: Sequence[int]
    ) -> tuple[Tensor, Callable[[], None]]:
        """Record a forward of the fused decoder, or of the decoder itself if there is none."""

        def run() -> Tensor:
            return self._run_compiled(embeds, positions, step, {}, wanted)

        for _ in range(WARM_UPS):
            self._recorder.run_beside(run)
        return self._recorder.record(run)

    def _run_compiled(
        self,
        embeds: Tensor,
        positions: Tensor,
        step: AttentionStep,
        extra: dict[str, Any],
        wanted: Sequence[int],
    ) -> Tensor:
        """Run the fused decoder, or the decoder itself if there is none or it cannot be compiled."""
        if self._fused is not None:
            try:
                return run_decoder(self._fused, embeds, positions, step, extra, wanted)
            except NOT_COMPILED as error:
                logger.warning("layers run uncompiled, which is slower: %s", first_lines(error))
                self._fused = None
        return run_decoder(self.decoder, embeds, positions, step, extra, wanted)


def _buffers(embeds: Tensor, positions: Tensor, step: AttentionStep, size: int, window: int) -> _Inputs:
    """Return inputs for `size` rows; unused rows read the first position, because a fully masked row gives NaN."""
    num_nodes = step.columns.shape[1]
    inputs = embeds.new_zeros(size, *embeds.shape[1:])
    input_positions = positions.new_zeros(*positions.shape[:-2], size, num_nodes)
    # Warm-ups write to a position that is never read.
    blocks, offsets = (
        part.new_full((size, *part.shape[1:]), unread)
        for part, unread in zip(step.index, step.cache.unread, strict=True)
    )
    mask, masks = None, {}
    if step.mask is not None:
        mask = inputs.new_full((size, 1, num_nodes, window), -torch.inf)
        mask[..., 0] = 0.0
        masks = {rule: mask.clone() for rule in step.masks}
    idle = step.kernel.idle(size) if isinstance(step.kernel, TreeAttention) else None
    return _Inputs(inputs, input_positions, blocks, offsets, mask, masks, idle)
