"""A decoder whose layers are compiled for a CPU: one small graph for all of them, all batches and all windows.

Fusing what lies between the matrices, and merging those that read the same input, saves what an eager forward spends
on launching kernels and passing over memory. Layers of one make share a graph that is given their weights, so compiling
takes seconds however deep the model is; still it waits until a kind of forward has run for a while, so that short jobs
never pay for it. Knows nothing of slots, trees or methods.
"""

from __future__ import annotations

import copy
import logging
import math
import time
import weakref
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config as symbols
from torch import Tensor, nn

from models.attention import AttentionStep
from models.cache import RaggedCache
from models.lanes import LaneModel
from models.packing import can_pack, forget, merge_linears, multiply
from models.running import run_decoder, take_over

logger = logging.getLogger(__name__)

MAX_GRAPHS = 16
"""Graphs of one decoder at most; torch makes one for each kind of forward."""


class Kind(NamedTuple):
    """What torch compiles separately: it takes an axis of length 1 for a constant."""

    is_prefill: bool
    is_single_row: bool
    is_single_column: bool


class CompiledDecoder:
    """Runs `decoder` as `models.running.run_decoder` does; stands for it in any number of `LaneModel`s.

    A kind of forward is compiled once it has run for `after_s` seconds uncompiled. Prefills that record attention, that
    add features in their layers or that leave out padding are never compiled, nor is the first forward of a memory.
    """

    def __init__(self, decoder: nn.Module, after_s: float) -> None:
        self._decoder = decoder
        self._after_s = after_s
        self._spent_s: dict[Kind, float] = {}
        self.compiled: set[Kind] = set()
        take_over(decoder)
        layers: list[nn.Module] = list(decoder.layers)  # type: ignore[arg-type]
        self._steps = _SharedLayer(layers)
        # The layers stay what they are while compiled steps are off.
        decoder.layers = nn.ModuleList(_Layer(layer, self._steps) for layer in layers)

    def __call__(self, embeds: Tensor, positions: Tensor, step: AttentionStep, extra: dict[str, Any]) -> Tensor:
        kind = Kind(step.num_leading_rows is None, embeds.shape[0] == 1, embeds.shape[1] == 1)
        is_odd = bool(extra) or step.probe is not None or (kind.is_prefill and step.mask is not None)
        is_due = kind in self.compiled or self._spent_s.get(kind, 0.0) >= self._after_s
        if is_odd or not is_due or not step.cache.is_made:
            started = time.perf_counter()
            hidden = run_decoder(self._decoder, embeds, positions, step, extra)
            self._spent_s[kind] = self._spent_s.get(kind, 0.0) + time.perf_counter() - started
            return hidden
        if kind not in self.compiled:
            return self._compile(kind, embeds, positions, step)
        with self._steps:
            return run_decoder(self._decoder, embeds, positions, step, extra)

    def _compile(self, kind: Kind, embeds: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        """The first compiled forward of a kind; without a working compiler it stays uncompiled, which is said."""
        started = time.perf_counter()
        for memory in (*step.cache.keys, *step.cache.values):
            # Heads and their size are the model's own: only rows and columns differ from forward to forward.
            torch._dynamo.mark_static(memory, 1)
            torch._dynamo.mark_static(memory, 3)
        torch._dynamo.mark_static(embeds, 2)
        try:
            with self._steps:
                hidden = run_decoder(self._decoder, embeds, positions, step, {})
        except torch._dynamo.exc.TorchDynamoException as error:
            # The first line says in which of torch's parts it happened, the second what it was.
            reason = " ".join((str(error) or type(error).__name__).splitlines()[:2])
            logger.warning("forwards stay uncompiled, which is slower: %s", reason)
            self._after_s = math.inf
            # What the layers before the failure wrote is written once more.
            return run_decoder(self._decoder, embeds, positions, step, {})
        self.compiled.add(kind)
        logger.info("compiled %s in %.1f s", kind, time.perf_counter() - started)
        return hidden


class _SharedLayer:
    """What all layers of a decoder are compiled as, and whether they are to run so at this moment."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.is_on = False
        # A layer without weights of its own and with the first place in its memory: what all of them are traced as.
        self._template = copy.deepcopy(layers[0]).to("meta")
        for module in self._template.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0
        self.call = torch.compile(
            self._run,
            fullgraph=True,
            dynamic=True,
            backend=_compile_merged,
            recompile_limit=MAX_GRAPHS,
            isolate_recompiles=True,
        )
        addresses = [parameter.data_ptr() for layer in layers for parameter in layer.parameters()]
        weakref.finalize(self, forget, addresses)

    def __enter__(self) -> None:
        # Axes that happen to be equally long at first, say window and head size, are not the same axis.
        self._patch = symbols.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        self._patch.__enter__()
        self.is_on = True

    def __exit__(self, *_: object) -> None:
        self.is_on = False
        self._patch.__exit__(None, None, None)

    def _run(
        self,
        weights: dict[str, Tensor],
        hidden: Tensor,
        rows: Tensor,
        columns: Tensor,
        mask: Tensor | None,
        key: Tensor,
        value: Tensor,
        given: dict[str, Any],
    ) -> Any:
        """One layer; tensors only, as a number among the arguments would become a constant of the graph."""
        window = hidden.shape[1] if mask is None else mask.shape[3]
        num_rows = None if mask is None else hidden.shape[0]
        step = AttentionStep(RaggedCache.over([key], [value]), rows, columns, mask, window, num_rows)
        return torch.func.functional_call(self._template, weights, (hidden,), {**given, "lanes": step})


class _Layer(nn.Module):
    """One layer in its place, which runs compiled while compiled steps are on."""

    def __init__(self, inner: nn.Module, shared: _SharedLayer) -> None:
        super().__init__()
        self.inner = inner
        self._shared = shared
        self._weights = dict(inner.named_parameters())
        self._place = next(int(module.layer_idx) for module in inner.modules() if hasattr(module, "layer_idx"))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # A decoder may ask its layers what kind they are.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, hidden: Tensor, **given: Any) -> Any:
        if not self._shared.is_on:
            return self.inner(hidden, **given)
        step: AttentionStep = given.pop("lanes")
        key, value = step.cache.keys[self._place], step.cache.values[self._place]
        return self._shared.call(self._weights, hidden, step.rows, step.columns, step.mask, key, value, given)


class PackedHead(nn.Module):
    """An output layer that always runs packed; `head` keeps its weights."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        return multiply(hidden, [self.head.weight], [self.head.bias])


class CompilableModel:
    """A decoder with its output layer, as a target or a drafter has them: makes memory for them, compiled or not."""

    decoder: nn.Module
    head: nn.Module
    _run: CompiledDecoder | None = None

    def lanes(self, num_slots: int, num_lanes: int, capacity: int) -> LaneModel:
        """Memory for `num_slots` samples of `num_lanes` rows and `capacity` columns."""
        if self._run is None:
            return LaneModel(self.decoder, self.head, num_slots, num_lanes, capacity)
        head = PackedHead(self.head) if type(self.head) is nn.Linear else self.head
        return LaneModel(self.decoder, head, num_slots, num_lanes, capacity, self._run)

    def compile(self, after_s: float) -> bool:
        """Compile kinds of forward from now on that have taken `after_s` seconds; says whether this model can be."""
        if self._run is None and can_compile(self.decoder):
            self._run = CompiledDecoder(self.decoder, after_s)
        return self._run is not None


def can_compile(decoder: nn.Module) -> bool:
    """Whether compiling is known to pay: a CPU, weights that its packed kernels take, and layers of one make."""
    layers = list(getattr(decoder, "layers", ()))
    makes = {
        (type(layer), *((name, one.shape, one.dtype, one.device) for name, one in layer.named_parameters()))
        for layer in layers
    }
    has_buffers = any(True for layer in layers for _ in layer.buffers())
    weights = [one for layer in layers for one in layer.parameters()]
    return len(makes) == 1 and not has_buffers and all(can_pack(one.device, one.dtype) for one in weights)


def _compile_merged(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    # Most processes never compile, and importing this takes a second.
    from torch._inductor.compile_fx import compile_fx

    merge_linears(module.graph)
    module.recompile()
    # The few small kernels of one layer need no pool of compiling processes beside the actor.
    return compile_fx(module, inputs, config_patches={"compile_threads": 1})
