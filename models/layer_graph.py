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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.experimental._config as symbols
from torch import Tensor, nn

from models.attention import AttentionStep
from models.attention_loops import can_loop
from models.cache import RaggedCache
from models.packing import forget, merge_linears

MAX_GRAPHS = 16
"""Graphs of one decoder at most; torch makes one for each kind of forward."""

_NAME = re.compile(r"L\['\w+'\](\[(\d+|'[\w.]+')\])*(\.(size|stride)\(\)\[\d+\])?")
"""How torch names what a graph is given: an argument, a part of one, or a length of either."""


@dataclass(frozen=True)
class _Graph:
    """A compiled function, and what picks its inputs out of the arguments; None where they come from elsewhere."""

    run: Callable[..., Sequence[Tensor]]
    pick: Callable[[dict[str, Any]], tuple[Any, ...]] | None


class LayerGraph:
    """Runs any one of `layers`, which are of one make, compiled.

    While it is not `is_on`, layers are to run as they are.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.is_on = False
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

    def __call__(self, **arguments: Any) -> Any:
        """See `_layer` for the arguments."""
        hidden, mask, key = arguments["hidden"], arguments["mask"], arguments["key"]
        window = 0 if mask is None else mask.shape[3]
        lengths = (hidden.shape[0], hidden.shape[1], window, key.shape[0], key.shape[2])
        graph = self._graphs.get(lengths)
        if graph is not None and graph.pick is not None:
            return graph.run(*graph.pick(arguments))[0]
        if self._in_loops is None:
            self._in_loops = can_loop(key)
        # Axes that happen to be equally long at first, say window and head size, are not the same axis; and a norm's
        # epsilon is a constant.
        with symbols.patch(use_duck_shape=False), torch._dynamo.config.patch(specialize_float=True):  # type: ignore[attr-defined]
            out = self._traced(**arguments)
        if isinstance(out, Tensor) and self._latest is not None:
            self._graphs[lengths] = self._latest
        return out

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
        from torch._inductor.compile_fx import compile_fx

        names = [node.meta["grapharg"].source.name for node in module.graph.nodes if node.op == "placeholder"]
        merge_linears(module.graph)
        module.recompile()
        # The few small kernels of one layer need no pool of compiling processes beside the actor.
        run: Any = compile_fx(
            module,
            inputs,
            config_patches={
                "compile_threads": 1,
                "size_asserts": False,
                "alignment_asserts": False,
                "nan_asserts": False,
            },
        )
        graph = _Graph(run, _picker(names))

        def noted(*given: Any) -> Sequence[Tensor]:
            self._latest = graph
            return run(*given)  # type: ignore[no-any-return]

        return noted


def _picker(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]] | None:
    """What makes a graph's inputs from the arguments, `L` by torch's name for them."""
    if not all(_NAME.fullmatch(name) for name in names):
        return None
    return eval(f"lambda L: ({''.join(f'{name}, ' for name in names)})")  # type: ignore[no-any-return]
