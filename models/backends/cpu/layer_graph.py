"""One graph that all layers of a decoder share: a layer without weights is traced, and called with those of any layer.

Torch checks before every call whether a graph still fits its arguments, and afterwards repeats what the traced function
did to Python objects: twice the time of a small layer. Both depend on the arguments' lengths only, so lengths that went
through torch once are remembered with their graph, which is called directly from then on. Knows one layer; nothing of
decoders or slots.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.experimental._config as symbols
from torch import Tensor, nn

from models.backends.attention import AttentionStep
from models.backends.cache import RaggedCache
from models.backends.cpu.attention import can_loop
from models.backends.cpu.decoder_frame import Watch
from models.backends.cpu.packing import forget, merge_linears

MAX_GRAPHS = 16
"""Graphs of one decoder at most; torch makes one for each kind of forward."""

_ASSERTS = ("size_asserts", "alignment_asserts", "nan_asserts")
"""What torch would check at every call of a graph."""

_NAME = re.compile(r"L\['\w+'\](\[(\d+|'[\w.]+')\])*(\.(size|stride)\(\)\[\d+\])?")
"""How torch names what a graph is given: an argument, a part of one, or a length of either."""


@dataclass
class _Graph:
    """A compiled function of the inputs that torch calls `names`, of which `LayerGraph` knows where to find them.

    `run` is the function as torch hands it over and `pick` takes its inputs from the arguments, None where torch wants
    what is not among them. `bare` is what is left of it without torch's own wrapping, and `filled` the inputs of every
    layer with its weights in their places; None where the two are not known to take the same inputs.
    """

    run: Callable[..., Sequence[Tensor]]
    pick: Callable[[dict[str, Any]], tuple[Any, ...]] | None
    names: Sequence[str]
    bare: Callable[[list[Any]], Sequence[Tensor]] | None
    filled: list[list[Any]] | None = None


class LayerGraph:
    """Runs any one of `layers`, which are of one make, or all in turn, compiled.

    While it is not `is_on`, layers are to run as they are; while there is a `watch`, they are to tell it what they do.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.is_on = False
        self.watch: Watch | None = None
        self._weights = [dict(layer.named_parameters()) for layer in layers]
        # A layer without weights of its own and with the first place in its memory: what all of them are traced as.
        self._template = copy.deepcopy(layers[0]).to("meta")
        for module in self._template.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0  # type: ignore[assignment]
        self._graphs: dict[tuple[int, ...], _Graph] = {}
        self._latest: _Graph | None = None
        self._in_loops: bool | None = None
        # The limit and its scope are not in torch's own type stubs.
        options: dict[str, Any] = {"recompile_limit": MAX_GRAPHS, "isolate_recompiles": True}
        self._traced = torch.compile(self._layer, fullgraph=True, dynamic=True, backend=self._compile, **options)
        addresses = [parameter.data_ptr() for layer in layers for parameter in layer.parameters()]
        weakref.finalize(self, forget, addresses)

    def __call__(self, place: int, hidden: Tensor, step: AttentionStep, given: dict[str, Any]) -> Any:
        """Layer number `place` over its inputs `hidden` (r, N, D); `given` is what its decoder gives it besides."""
        lengths = _lengths(hidden, step)
        arguments = self._arguments(place, hidden, step, given)
        graph = self._graphs.get(lengths)
        if graph is not None and graph.pick is not None:
            return graph.run(*graph.pick(arguments))[0]
        if self._in_loops is None:
            self._in_loops = can_loop(arguments["key"])
        # Axes that happen to be equally long at first, say window and head size, are not the same axis; and a norm's
        # epsilon is a constant.
        with symbols.patch(use_duck_shape=False), torch._dynamo.config.patch(specialize_float=True):  # type: ignore[attr-defined]
            out = self._traced(**arguments)
        if isinstance(out, Tensor) and self._latest is not None:
            self._graphs[lengths] = self._latest
        return out

    def run_all(self, hidden: Tensor, step: AttentionStep, given: dict[str, Any]) -> Tensor:
        """One layer after the other, each over what the one before it returned; all are given the same besides."""
        graph = self._graphs.get(_lengths(hidden, step))
        if graph is None or graph.pick is None or graph.bare is None:
            for place in range(len(self._weights)):
                hidden = self(place, hidden, step, given)
            return hidden
        if graph.filled is None:
            graph.filled = [self._fill(graph, weights) for weights in self._weights]
        # What layers return is dense; what they are given first need not be, and its strides would be taken for all.
        hidden = hidden.contiguous()
        inputs = graph.pick(self._arguments(0, hidden, step, given))
        # What differs from layer to layer: weights, which are in their places already, and these three.
        at_hidden, at_key, at_value = (graph.names.index(name) for name in ("L['hidden']", "L['key']", "L['value']"))
        shared = [(at, one) for at, one in enumerate(inputs) if graph.filled[0][at] is None]
        bare, keys, values = graph.bare, step.cache.keys, step.cache.values
        for place, filled in enumerate(graph.filled):
            ready = filled.copy()
            for at, one in shared:
                ready[at] = one
            ready[at_hidden], ready[at_key], ready[at_value] = hidden, keys[place], values[place]
            hidden = bare(ready)[0]
        return hidden

    def _arguments(self, place: int, hidden: Tensor, step: AttentionStep, given: dict[str, Any]) -> dict[str, Any]:
        return {
            "weights": self._weights[place],
            "hidden": hidden,
            "rows": step.rows,
            "columns": step.columns,
            "mask": step.mask,
            "key": step.cache.keys[place],
            "value": step.cache.values[place],
            "given": given,
        }

    @staticmethod
    def _fill(graph: _Graph, weights: Mapping[str, Tensor]) -> list[Any]:
        """A layer's inputs as far as they are the same in every forward: its weights."""
        found = {f"L['weights'][{name!r}]": weight for name, weight in weights.items()}
        return [found.get(name) for name in graph.names]

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
        """One layer; tensors only, as a number among the arguments would become a constant of the graph."""
        window = hidden.shape[1] if mask is None else mask.shape[3]
        num_rows = None if mask is None else hidden.shape[0]
        step = AttentionStep(
            RaggedCache.over([key], [value]), rows, columns, mask, window, num_rows, in_loops=bool(self._in_loops)
        )
        return torch.func.functional_call(self._template, weights, (hidden,), {**given, "lanes": step})

    def _compile(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Sequence[Tensor]]:
        # Most processes never compile, and importing this takes a second.
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        names = [node.meta["grapharg"].source.name for node in module.graph.nodes if node.op == "placeholder"]
        merge_linears(module.graph)
        module.recompile()
        bare: list[Callable[[list[Any]], Sequence[Tensor]]] = []

        def compile_inside(inner: torch.fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
            compiled: Any = compile_fx_inner(inner, examples, **options)
            nodes = inner.graph.nodes
            outputs = next(node for node in reversed(nodes) if node.op == "output").args[0]
            # Torch may have added inputs, or outputs that its wrapping still has to copy somewhere.
            if len(examples) == len(names) and len(outputs) == 1 and callable(found := compiled.current_callable):
                bare.append(found)
            return compiled

        # The few small kernels of one layer need no pool of compiling processes beside the actor.
        options: dict[str, Any] = {"compile_threads": 1} | dict.fromkeys(_ASSERTS, False)
        if tuple(inputs[names.index("L['hidden']")].shape[:2]) == (1, 1):
            # What lies between the products of one node is done before a second thread is awake.
            options["cpp.threads"] = 1
        # What comes whole out of the outer of torch's two caches has not passed by `compile_inside`; the inner one,
        # which saves most of the time, is kept.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            run: Any = compile_fx(module, inputs, inner_compile=compile_inside, config_patches=options)
        graph = _Graph(run, _picker(names), names, bare[0] if len(bare) == 1 else None)

        def noted(*given: Any) -> Sequence[Tensor]:
            self._latest = graph
            return run(*given)  # type: ignore[no-any-return]

        return noted


def _lengths(hidden: Tensor, step: AttentionStep) -> tuple[int, ...]:
    """All that decides which graph a forward runs."""
    key = step.cache.keys[0]
    assert key is not None, "the first forward of a memory runs uncompiled"
    window = 0 if step.mask is None else step.mask.shape[3]
    return hidden.shape[0], hidden.shape[1], window, key.shape[0], key.shape[2]


def _picker(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]] | None:
    """What makes a graph's inputs from the arguments, `L` by torch's name for them."""
    if not all(_NAME.fullmatch(name) for name in names):
        return None
    return eval(f"lambda L: ({''.join(f'{name}, ' for name in names)})")  # type: ignore[no-any-return]
