"""Compiles one graph for all layers of a decoder: one layer is traced with its weights as inputs of the graph.

Guards before a call of torch.compile and side effects on Python objects after it take twice the time of a small layer.
Both depend on the arguments' lengths only, so lengths that were run once are mapped to their graph, which is then
called directly. `run` also skips torch's wrapper of the generated code. Decision 27 has the speedups.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx.experimental._config as symbols
from torch import Tensor, nn

from models.backends.attention import AttentionStep, LayerInputs
from models.backends.cache import RaggedCache
from models.backends.cpu.attention import ROWS_KERNEL, can_attend
from models.backends.cpu.decoder_frame import FrameRecorder
from models.backends.cpu.packing import forget, merge_linears
from models.backends.layers import template_of

MAX_GRAPHS = 16
"""Maximum number of graphs of one decoder (`recompile_limit`); torch compiles a graph for each kind of forward."""

_ASSERTS = ("size_asserts", "alignment_asserts", "nan_asserts")
"""Checks in generated code that are switched off."""

_NAME = re.compile(r"L\['\w+'\](\[(\d+|'[\w.]+')\])*(\.(size|stride)\(\)\[\d+\])?")
"""Matches dynamo's source name of a graph input: an argument, its element, or a size or stride of either."""


@dataclass(eq=False)
class _Graph:
    """A compiled function with inputs `names`.

    `pick` selects its inputs from the arguments; None if they cannot be selected. `generated` is the generated code
    without torch's wrapper; None if its inputs may differ. Torch never releases a graph, so it has no weights.
    """

    run: Callable[..., Sequence[Tensor]]
    pick: Callable[[dict[str, Any]], tuple[Any, ...]] | None
    names: Sequence[str]
    generated: Callable[[list[Any]], Sequence[Tensor]] | None


class LayerGraph:
    """Runs the layers of a decoder, which must have equal structure, with one shared compiled graph.

    If `recorder` is set, each layer reports its call to it. `has_failed` is set after a compilation failure.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.recorder: FrameRecorder | None = None
        self.has_failed = False
        self._weights = [dict(layer.named_parameters()) for layer in layers]
        self._template = template_of(layers)
        self._graphs: dict[tuple[int, ...], _Graph] = {}
        self._latest: _Graph | None = None
        self._layer_inputs: dict[_Graph, list[list[Any]]] = {}
        self._has_kernel: bool | None = None
        # These options are missing in torch's type stubs.
        options: dict[str, Any] = {"recompile_limit": MAX_GRAPHS, "isolate_recompiles": True}
        # Torch never releases a backend.
        backend = partial(_compile, weakref.ref(self))
        self._traced = torch.compile(self._layer, fullgraph=True, dynamic=True, backend=backend, **options)
        addresses = [parameter.data_ptr() for layer in layers for parameter in layer.parameters()]
        weakref.finalize(self, forget, addresses)

    def run_layer(self, index: int, hidden: Tensor, step: AttentionStep, given: dict[str, Any]) -> Any:
        """Run layer `index` for a copied decoder, and report the call."""
        out = self(index, hidden, step, given)
        if self.recorder is not None:
            self.recorder.record(hidden, given, out)
        return out

    def __call__(self, index: int, hidden: Tensor, step: AttentionStep, given: dict[str, Any]) -> Any:
        """Run layer `index` on `hidden` (r, N, D); `given` are the decoder's other keyword arguments."""
        lengths = _lengths(hidden, step)
        arguments = self._arguments(index, hidden, step, given)
        graph = self._graphs.get(lengths)
        if graph is not None and graph.pick is not None:
            return graph.run(*graph.pick(arguments))[0]
        if self._has_kernel is None:
            self._has_kernel = can_attend(arguments["key"])
        # Axes of equal length in the first call, such as window and head size, are different axes; a norm's epsilon is
        # a constant.
        with symbols.patch(use_duck_shape=False), torch._dynamo.config.patch(specialize_float=True):  # type: ignore[attr-defined]
            out = self._traced(**arguments)
        if isinstance(out, Tensor) and self._latest is not None:
            self._graphs[lengths] = self._latest
        return out

    def run(
        self,
        indices: Sequence[int],
        hidden: Tensor,
        step: AttentionStep,
        given: dict[str, Any],
        recorded: LayerInputs | None = None,
    ) -> Tensor:
        """Run the layers `indices` in turn over `hidden` (r, N, D) with the same other arguments `given`.

        Each layer's input is added to `recorded`.
        """
        recorded = recorded or LayerInputs((), ())
        graph = self._graphs.get(_lengths(hidden, step))
        if graph is None or graph.pick is None or graph.generated is None:
            for index in indices:
                recorded.add(index, hidden)
                hidden = self(index, hidden, step, given)
            return hidden
        layer_inputs = self._layer_inputs.get(graph)
        if layer_inputs is None:
            layer_inputs = [self._weight_inputs(graph, weights) for weights in self._weights]
            self._layer_inputs[graph] = layer_inputs
        # Layers return contiguous states; the generated code requires the same of the first input.
        hidden = hidden.contiguous()
        inputs = graph.pick(self._arguments(indices[0], hidden, step, given))
        # Besides the weights, these three inputs differ between layers.
        hidden_at, key_at, value_at = (graph.names.index(name) for name in ("L['hidden']", "L['key']", "L['value']"))
        shared = [(at, value) for at, value in enumerate(inputs) if layer_inputs[0][at] is None]
        for index in indices:
            recorded.add(index, hidden)
            arguments = layer_inputs[index].copy()
            for at, value in shared:
                arguments[at] = value
            arguments[hidden_at] = hidden
            arguments[key_at], arguments[value_at] = step.cache.keys[index], step.cache.values[index]
            hidden = graph.generated(arguments)[0]
        return hidden

    def _arguments(self, index: int, hidden: Tensor, step: AttentionStep, given: dict[str, Any]) -> dict[str, Any]:
        return {
            "weights": self._weights[index],
            "hidden": hidden,
            "rows": step.rows,
            "columns": step.columns,
            "mask": step.mask_of(index),
            "key": step.cache.keys[index],
            "value": step.cache.values[index],
            "given": given,
        }

    @staticmethod
    def _weight_inputs(graph: _Graph, weights: Mapping[str, Tensor]) -> list[Any]:
        """Return a layer's inputs that are weights, by position; None for the other inputs."""
        by_name = {f"L['weights'][{name!r}]": weight for name, weight in weights.items()}
        return [by_name.get(name) for name in graph.names]

    def _layer(
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
        """Run one layer; torch.compile traces this. It takes tensors only, because numbers would be specialized."""
        window = hidden.shape[1] if mask is None else mask.shape[3]
        num_rows = None if mask is None else mask.shape[0]
        kernel = ROWS_KERNEL if self._has_kernel else None
        cache = RaggedCache.over([key], [value])
        index = rows[:, None], columns
        step = AttentionStep(cache, rows, columns, mask, window, num_rows, kernel=kernel, index=index)
        return torch.func.functional_call(self._template, weights, (hidden,), {**given, "lanes": step})


def _compile(
    owner: weakref.ref[LayerGraph], module: torch.fx.GraphModule, inputs: list[Any]
) -> Callable[..., Sequence[Tensor]]:
    """Compile a traced graph; the result reports every call to its owner. Neither keeps the owner alive."""
    # The import takes a second, and most processes never compile.
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    names = [node.meta["grapharg"].source.name for node in module.graph.nodes if node.op == "placeholder"]
    merge_linears(module.graph)
    module.recompile()
    generated: list[Callable[[list[Any]], Sequence[Tensor]]] = []

    def compile_inner(inner: torch.fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        compiled: Any = compile_fx_inner(inner, examples, **options)
        outputs = next(node for node in reversed(inner.graph.nodes) if node.op == "output").args[0]
        # Torch may have added inputs, or outputs that its wrapper copies.
        if len(examples) == len(names) and len(outputs) == 1 and callable(function := compiled.current_callable):
            generated.append(function)
        return compiled

    # The few kernels of one layer need no pool of compiler processes.
    options: dict[str, Any] = {"compile_threads": 1} | dict.fromkeys(_ASSERTS, False)
    if tuple(inputs[names.index("L['hidden']")].shape[:2]) == (1, 1):
        # A single node's element-wise kernels finish before a second thread wakes up.
        options["cpp.threads"] = 1
    # A hit in torch's outer cache would bypass `compile_inner`. The inner cache saves most of the time.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        run: Any = compile_fx(module, inputs, inner_compile=compile_inner, config_patches=options)
    graph = _Graph(run, _picker(names), names, generated[0] if len(generated) == 1 else None)

    def recorded(*inputs: Any) -> Sequence[Tensor]:
        if (layer_graph := owner()) is not None:
            layer_graph._latest = graph
        return run(*inputs)  # type: ignore[no-any-return]

    return recorded


def _lengths(hidden: Tensor, step: AttentionStep) -> tuple[int, ...]:
    """Return the lengths that determine the graph: rows, nodes, window, rows and positions of the cache."""
    key = step.cache.keys[0]
    assert key is not None, "the first forward over a cache runs uncompiled"
    window = 0 if step.mask is None else step.mask.shape[3]
    return hidden.shape[0], hidden.shape[1], window, key.shape[0], key.shape[2]


def _picker(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]] | None:
    """Return a function that selects graph inputs `names` from the arguments `L`; None if a name is not recognized."""
    if not all(_NAME.fullmatch(name) for name in names):
        return None
    return eval(f"lambda L: ({''.join(f'{name}, ' for name in names)})")  # type: ignore[no-any-return]
