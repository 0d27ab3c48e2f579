"""A decoder whose layers are compiled for a CPU: one small graph for all of them, all batches and all windows.

Fusing what lies between the matrices, and merging those that read the same input, saves what an eager forward spends
on launching kernels and passing over memory. Layers of one make share a graph that is given their weights, so compiling
takes seconds however deep the model is. A kind of forward is compiled at its first use: which kernels a forward runs
follows from what it is, never from the clock. Knows nothing of slots, trees or methods.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.backends.attention import AttentionStep
from models.backends.cpu.decoder_frame import Frame, Watch
from models.backends.cpu.layer_graph import LayerGraph
from models.backends.cpu.packing import can_pack, forget, multiply
from models.backends.cuda.graphs import CapturedDecoder, CudaRecorder
from models.backends.cuda.prompt_prefetch import PromptThread
from models.backends.forward import run_decoder, take_over
from models.kv.free_memory import free_bytes
from models.kv.lanes import LaneModel
from models.loading.vocabulary import SlicedHead

logger = logging.getLogger(__name__)


NOT_COMPILED = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)
ROOM = 1.25
"""Memory that has to be free before weights are packed, in sizes of the weights."""


class Kind(NamedTuple):
    """What torch compiles separately: it takes an axis of length 1 for a constant."""

    is_prefill: bool
    is_single_row: bool
    is_single_column: bool


class CompiledDecoder:
    """Runs `decoder` as `models.backends.forward.run_decoder` does; stands for it in any number of `LaneModel`s.

    A kind of forward is compiled at its first use. Prefills that record attention, that add features in their layers or
    that leave out padding are never compiled. `has_failed` says that compiling has failed: all forwards since then run
    uncompiled.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder
        self.has_failed = False
        self.compiled: set[Kind] = set()
        take_over(decoder)
        layers: list[nn.Module] = list(decoder.layers)  # type: ignore[arg-type]
        self._graph = LayerGraph(layers)
        self._frames: dict[tuple[Kind, int], Frame | None] = {}
        self._num_bytes = sum(one.numel() * one.element_size() for layer in layers for one in layer.parameters())
        # The layers stay what they are while no compiled forward is at work.
        decoder.layers = nn.ModuleList(_Layer(place, layer, self._graph) for place, layer in enumerate(layers))

    def __call__(self, embeds: Tensor, positions: Tensor, step: AttentionStep, extra: dict[str, Any]) -> Tensor:
        kind = Kind(step.num_leading_rows is None, embeds.shape[0] == 1, embeds.shape[1] == 1)
        is_odd = bool(extra) or step.probe is not None or (kind.is_prefill and step.mask is not None)
        if is_odd or self.has_failed:
            return run_decoder(self._decoder, embeds, positions, step, extra)
        if not step.cache.is_made:
            # Graphs read a memory that exists: an uncompiled forward makes it, and the compiled one writes the same
            # columns again, so that no forward rounds otherwise because it is the first.
            run_decoder(self._decoder, embeds, positions, step, {})
        if kind in self.compiled:
            return self._run(kind, embeds, positions, step)
        return self._compile(kind, embeds, positions, step)

    def _run(self, kind: Kind, embeds: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        """A compiled forward. Torch may compile at any of them, for lengths that it tells apart, and may fail."""
        self._graph.is_on = True
        try:
            # Positions of one axis and of several are not the same to a decoder.
            form = kind, positions.dim()
            if (frame := self._frames.get(form)) is not None:
                return frame.after(self._graph.run_all(embeds, step, frame.before(embeds, positions)))
            if form in self._frames:
                return run_decoder(self._decoder, embeds, positions, step, {})
            with Watch(self._decoder, len(self._decoder.layers)) as self._graph.watch:  # type: ignore[arg-type]
                hidden = run_decoder(self._decoder, embeds, positions, step, {})
            frame = self._graph.watch.learn(embeds, positions, hidden)
            if frame is not None:
                # The proof: the same forward once more, which writes the same into the memory.
                again = frame.after(self._graph.run_all(embeds, step, frame.before(embeds, positions)))
                frame = frame if torch.equal(again, hidden) else None
            self._frames[form] = frame
            return hidden
        except NOT_COMPILED as error:
            # The first line says in which of torch's parts it happened, the second what it was.
            reason = " ".join((str(error) or type(error).__name__).splitlines()[:2])
        finally:
            self._graph.is_on = False
            self._graph.watch = None
        # What the layers before the failure wrote is written once more.
        return self._give_up(reason, (embeds, positions, step))

    def _compile(self, kind: Kind, embeds: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        """The first compiled forward of a kind; without a working compiler, or memory for packed weights, it stays
        uncompiled, which is said."""
        started = time.perf_counter()
        if not self.compiled and (free := free_bytes()) < ROOM * self._num_bytes:
            return self._give_up(
                f"{free / 2**30:.1f} GiB of memory are free, and packed weights would take "
                f"{self._num_bytes / 2**30:.1f} GiB",
                (embeds, positions, step),
            )
        for memory in (*step.cache.keys, *step.cache.values):
            # Heads and their size are the model's own: only rows and columns differ from forward to forward.
            torch._dynamo.mark_static(memory, 1)
            torch._dynamo.mark_static(memory, 3)
        torch._dynamo.mark_static(embeds, 2)
        hidden = self._run(kind, embeds, positions, step)
        if not self.has_failed:
            self.compiled.add(kind)
            logger.info("compiled %s in %.1f s", kind, time.perf_counter() - started)
        return hidden

    def _give_up(self, reason: str, forward: tuple[Tensor, Tensor, AttentionStep]) -> Tensor:
        logger.warning("forwards stay uncompiled, which is slower: %s", reason)
        self.has_failed = True
        self.compiled.clear()
        return run_decoder(self._decoder, *forward, {})


class _Layer(nn.Module):
    """One layer in its place, which runs compiled while compiled steps are on, and is noted while there is a watch."""

    def __init__(self, place: int, inner: nn.Module, graph: LayerGraph) -> None:
        super().__init__()
        self.inner = inner
        self._graph = graph
        self._place = place

    def __getattr__(self, name: str) -> Any:
        # A decoder may ask its layers what kind they are.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, hidden: Tensor, **given: Any) -> Any:
        if not self._graph.is_on:
            return self.inner(hidden, **given)
        step: AttentionStep = given.pop("lanes")
        out = self._graph(self._place, hidden, step, given)
        if self._graph.watch is not None:
            self._graph.watch.note(hidden, given, out)
        return out


class PackedHead(nn.Module):
    """An output layer that always runs packed; `head` keeps its weights."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        return multiply(hidden, [self.head.weight], [self.head.bias])


def pack_head(head: nn.Module) -> nn.Module:
    """An output layer, or the rows of one, that runs packed; layers of other makes stay as they are."""
    if isinstance(head, SlicedHead) and type(head.rows) is nn.Linear:
        rows = PackedHead(head.rows)
        # Slices come and go with their engines, and their packed copies with them.
        weakref.finalize(rows, forget, [head.rows.weight.data_ptr()])
        return SlicedHead(rows, head.token_ids, head.vocab_size)
    return PackedHead(head) if type(head) is nn.Linear else head


class CompilableModel:
    """A decoder with its output layer, as a target or a drafter has them: makes memory for them, compiled or not."""

    decoder: nn.Module
    head: nn.Module
    device: torch.device
    prompt_thread: PromptThread | None = None
    _run: CompiledDecoder | CapturedDecoder | None = None

    def lanes(self, num_slots: int, num_lanes: int, capacity: int) -> LaneModel:
        """Memory for `num_slots` samples of `num_lanes` rows and `capacity` columns."""
        if self._run is None:
            return LaneModel(self.decoder, self.head, num_slots, num_lanes, capacity)
        head = pack_head(self.head) if isinstance(self._run, CompiledDecoder) else self.head
        return LaneModel(self.decoder, head, num_slots, num_lanes, capacity, self._run)

    def compile(self) -> bool:
        """Compile every kind of forward at its first use from now on; returns whether this model can be compiled."""
        if self._run is None and can_compile(self.decoder):
            self._run = CompiledDecoder(self.decoder)
        return isinstance(self._run, CompiledDecoder)

    @property
    def kernels(self) -> str:
        """The kernel path of this model's forwards: type of the weights, device, and what runs them."""
        weight = next(self.decoder.parameters())
        if weight.device.type == "cuda":
            device = torch.cuda.get_device_name(weight.device)
        else:
            device = f"{weight.device.type} {torch.backends.cpu.get_cpu_capability()}"
        how = "eager"
        if isinstance(self._run, CapturedDecoder):
            how = "captured"
        elif isinstance(self._run, CompiledDecoder):
            how = "eager, compiling failed" if self._run.has_failed else "compiled"
        return f"{str(weight.dtype).removeprefix('torch.')}, {device}, {how}, torch {torch.__version__}"

    def capture(self) -> bool:
        """Replay steps as CUDA graphs from now on; says whether this model can, which takes one CUDA device."""
        devices = {parameter.device for parameter in self.decoder.parameters()}
        if self._run is None and len(devices) == 1 and (device := next(iter(devices))).type == "cuda":
            self._run = CapturedDecoder(self.decoder, CudaRecorder(device))
        return isinstance(self._run, CapturedDecoder)

    def make_prompts_ahead(self) -> None:
        """Have prompts made on a thread of their own from now on; engines that were made before do without."""
        self.prompt_thread = self.prompt_thread or PromptThread(self.device)


def can_compile(decoder: nn.Module) -> bool:
    """Whether compiling is known to pay: a CPU, weights that its packed kernels take, and layers of one make."""
    layers = list(getattr(decoder, "layers", ()))
    weights = [one for layer in layers for one in layer.parameters()]
    has_buffers = any(True for layer in layers for _ in layer.buffers())
    are_alike = bool(layers) and all(_make(layer) == _make(layers[0]) for layer in layers)
    return are_alike and not has_buffers and all(can_pack(one.device, one.dtype) for one in weights)


def _make(layer: nn.Module) -> list[object]:
    """All that a graph takes for granted of a layer: its parts, their constants, the form of its weights."""
    parts: list[object] = []
    for name, module in layer.named_modules():
        constants = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str)) and key != "layer_idx"
        }
        parts.append((name, type(module), constants))
    return [*parts, *((name, one.shape, one.dtype, one.device) for name, one in layer.named_parameters())]
