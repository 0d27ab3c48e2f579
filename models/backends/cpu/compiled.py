"""Run a decoder with layers compiled for a CPU: one graph for all layers, batch sizes and windows.

Compilation fuses the element-wise operations between GEMMs and merges GEMMs of one input. Layers of the same structure
share one graph, so compilation takes seconds at any depth. Each kind of forward is compiled at its first use, so
that the kernels of a forward depend on its shape only.
"""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.backends.attention import (
    AttentionStep,
    DecoderRunner,
    LayerInputs,
    run_decoder,
    some_layers,
)
from models.backends.cpu.decoder_frame import DecoderFrame, FrameRecorder
from models.backends.cpu.layer_graph import LayerGraph
from models.backends.cpu.packing import can_pack, forget, multiply
from models.backends.layers import NOT_COMPILED, are_alike, first_lines, with_layers
from models.backends.mask_rules import rules_of, tree_rule
from models.backends.memory import free_bytes

logger = logging.getLogger(__name__)

MIN_FREE = 1.25
"""Free memory that packing requires, as a multiple of the bytes of the weights."""


class ForwardKind(NamedTuple):
    """Key of forwards that torch compiles separately, because it specializes axes of length 1."""

    is_prefill: bool
    is_single_row: bool
    is_single_column: bool


class CompiledDecoder(DecoderRunner):
    """Runs a decoder with compiled layers; the decoder itself is not changed.

    Prefills that record attention, add features inside layers, mask padding or exceed a window run eagerly. After a
    compilation failure (`has_failed`) all forwards run eagerly.
    """

    is_compiled = True

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__(decoder)
        self.compiled: set[ForwardKind] = set()
        layers: list[nn.Module] = list(decoder.layers)  # type: ignore[arg-type]
        self._indices: Sequence[int] = range(len(layers))
        self._graph = LayerGraph(layers)
        self._frames: dict[tuple[ForwardKind, int], DecoderFrame | None] = {}
        self._num_bytes = sum(
            weight.numel() * weight.element_size() for layer in layers for weight in layer.parameters()
        )
        self._compiled_decoder = with_layers(decoder, self._graph.run_layer)

    def of_layers(self, indices: Sequence[int]) -> CompiledDecoder:
        # The copy shares the graph, the kinds that were compiled and the packed weights.
        runner = copy.copy(self)
        runner.decoder, runner._indices, runner._frames = some_layers(self.decoder, indices), tuple(indices), {}
        runner._compiled_decoder = some_layers(self._compiled_decoder, indices)
        return runner

    @property
    def mode(self) -> str:  # type: ignore[override]
        return "eager, compiling failed" if self.has_failed else "compiled"

    @property
    def has_failed(self) -> bool:
        """Whether compilation failed for this runner or for one that shares its graph."""
        return self._graph.has_failed

    def output_layer(self, head: nn.Module) -> nn.Module:
        return pack_head(head)

    def __call__(
        self,
        embeds: Tensor,
        positions: Tensor,
        step: AttentionStep,
        extra: dict[str, Any],
        wanted: Sequence[int] = (),
    ) -> Tensor:
        kind = ForwardKind(step.num_leading_rows is None, embeds.shape[0] == 1, embeds.shape[1] == 1)
        is_special = bool(extra) or step.probe is not None or (kind.is_prefill and step.mask is not None)
        # All layers have one rule, see `can_compile`.
        is_special |= kind.is_prefill and not step.cache.rule_of(0).is_causal_within(embeds.shape[1])
        if is_special or self.has_failed:
            return run_decoder(self.decoder, embeds, positions, step, extra, wanted)
        if not step.cache.is_made:
            # Graphs require an allocated cache. The eager forward allocates it, and the compiled one then overwrites
            # the same positions, so the first forward rounds as all later ones do.
            run_decoder(self.decoder, embeds, positions, step, {})
        if kind in self.compiled:
            return self._run(kind, embeds, positions, step, wanted)
        return self._compile(kind, embeds, positions, step, wanted)

    def _run(
        self, kind: ForwardKind, embeds: Tensor, positions: Tensor, step: AttentionStep, wanted: Sequence[int]
    ) -> Tensor:
        """Run a compiled forward. Torch may compile new lengths; if that fails, the forward runs eagerly."""
        try:
            # Decoders handle positions of one axis and of several axes differently.
            form = kind, positions.dim()
            if (frame := self._frames.get(form)) is not None:
                inputs = LayerInputs((), wanted)
                last = self._graph.run(self._indices, embeds, step, frame.before(embeds, positions), inputs)
                return inputs.behind(frame.after(last))
            if form in self._frames:
                return run_decoder(self._compiled_decoder, embeds, positions, step, {}, wanted)
            with FrameRecorder(self.decoder, len(self.decoder.layers)) as recorder:  # type: ignore[arg-type]
                self._graph.recorder = recorder
                outputs = run_decoder(self._compiled_decoder, embeds, positions, step, {}, wanted)
            hidden = outputs[..., : embeds.shape[-1]] if wanted else outputs
            frame = recorder.frame(embeds, positions, hidden)
            if frame is not None:
                # The frame is used only if it repeats the forward bitwise; it writes the same keys and values.
                repeated = frame.after(self._graph.run(self._indices, embeds, step, frame.before(embeds, positions)))
                frame = frame if torch.equal(repeated, hidden) else None
            self._frames[form] = frame
            return outputs
        except NOT_COMPILED as error:
            reason = first_lines(error)
        finally:
            self._graph.recorder = None
        # Layers before the failure have written their keys and values; the eager forward writes the same again.
        return self._fall_back(reason, (embeds, positions, step), wanted)

    def _compile(
        self, kind: ForwardKind, embeds: Tensor, positions: Tensor, step: AttentionStep, wanted: Sequence[int]
    ) -> Tensor:
        """Compile and run the first forward of a kind. Without a working compiler or memory for packed weights, the
        forward runs eagerly and a warning is logged."""
        started = time.perf_counter()
        if not self.compiled and (free := free_bytes()) < MIN_FREE * self._num_bytes:
            return self._fall_back(
                f"{free / 2**30:.1f} GiB of memory are free, and packed weights would take "
                f"{self._num_bytes / 2**30:.1f} GiB",
                (embeds, positions, step),
                wanted,
            )
        for tensor in (*step.cache.keys, *step.cache.values):
            # Only rows and positions differ between forwards; heads and head size are static.
            torch._dynamo.mark_static(tensor, 1)
            torch._dynamo.mark_static(tensor, 3)
        torch._dynamo.mark_static(embeds, 2)
        hidden = self._run(kind, embeds, positions, step, wanted)
        if not self.has_failed:
            self.compiled.add(kind)
            logger.info("compiled %s in %.1f s", kind, time.perf_counter() - started)
        return hidden

    def _fall_back(self, reason: str, forward: tuple[Tensor, Tensor, AttentionStep], wanted: Sequence[int]) -> Tensor:
        logger.warning("forwards run uncompiled, which is slower: %s", reason)
        self._graph.has_failed = True
        self.compiled.clear()
        return run_decoder(self.decoder, *forward, {}, wanted)


class PackedHead(nn.Module):
    """Output layer with packed weights of the linear layer `head`."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head
        # The packed copy keeps the weight alive, and is released with the layer: a model's, or an engine's slice.
        weakref.finalize(head, forget, [head.weight.data_ptr()])

    def forward(self, hidden: Tensor) -> Tensor:
        return multiply(hidden, [self.head.weight], [self.head.bias])


def pack_head(head: Any) -> nn.Module:
    """Return a linear layer or a `SlicedHead` of one with packed weights; other layers are returned unchanged."""
    if type(getattr(head, "rows", None)) is nn.Linear:
        sliced: nn.Module = head.with_rows(PackedHead(head.rows))
        return sliced
    return PackedHead(head) if type(head) is nn.Linear else head


def can_compile(decoder: nn.Module) -> bool:
    """Return whether all layers have equal structure, no buffers, and weights that packed kernels support.

    Layers may have one common window or chunk, and no soft caps, sinks or blocks of tokens.
    """
    layers = list(getattr(decoder, "layers", ()))
    rules = set(rules_of(decoder))
    if len(rules) > 1 or any(rule != tree_rule(rule) for rule in rules):
        return False
    weights = [weight for layer in layers for weight in layer.parameters()]
    return are_alike(layers) and all(can_pack(weight.device, weight.dtype) for weight in weights)
