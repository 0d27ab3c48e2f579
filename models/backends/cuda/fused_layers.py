"""Run decoder layers through one function compiled by torch.compile, which fuses their element-wise operations.

A decoding step of few rows reads weights and launches many small kernels, whose time counts; a fused layer launches a
third of them. One layer is traced with its weights as arguments, so all layers of a decoder share its graphs; numbers
of rows, nodes and KV positions are symbols. Linear layers of one input are merged; attention has a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx.experimental._config as symbols
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.fx import GraphModule

from models.backends.attention import IMPLEMENTATION, AttentionStep
from models.backends.cache import RaggedCache
from models.backends.cuda.merged_weights import drop_repeated, merge_layer, merge_template
from models.backends.cuda.tree_attention import TreeAttention, TreeKernel
from models.backends.layers import are_alike, template_of, with_layers
from models.backends.mask_rules import rules_of

INDUCTOR = "inductor"
MAX_GRAPHS = 64
"""Maximum number of graphs of a process (`recompile_limit`); torch compiles axes of length 1 separately."""


class FusedLayers:
    """Runs the layers of a decoder, which must have equal structure, with one shared compiled function.

    `compiler` is a backend of torch.compile; "eager" traces and compiles nothing.
    """

    def __init__(self, layers: Sequence[nn.Module], compiler: str = INDUCTOR) -> None:
        # Before the first capture, because it moves weights in memory.
        self._template = template_of(layers)
        merge_template(self._template)
        self._weights = [merge_layer(layer) for layer in layers]
        self._kernel: TreeKernel | None = None

        def compile_graph(graph: GraphModule, inputs: list[Any]) -> Any:
            run = lookup_backend(compiler)
            # The few kernels of a layer need no pool of processes.
            options: dict[str, Any] = {"config_patches": {"compile_threads": 1}} if compiler == INDUCTOR else {}
            return run(drop_repeated(graph), inputs, **options)

        self._compiled = torch.compile(self._layer, fullgraph=True, dynamic=True, backend=compile_graph)

    def run_layer(self, index: int, hidden: Tensor, step: AttentionStep, given: dict[str, Any]) -> Any:
        """Run layer `index` on `hidden` (r, N, D); `given` are the decoder's other keyword arguments."""
        keys, values = step.cache.layer(index)
        for memory in (keys, values):
            for axis in (1, 3):
                torch._dynamo.mark_static(memory, axis)
        torch._dynamo.mark_static(hidden, 2)
        trees = None
        if isinstance(step.kernel, TreeAttention):
            self._kernel, trees = step.kernel.kernel, step.kernel.changing
        # Axes of equal length in the first call are different axes; a norm's epsilon is a constant.
        with symbols.patch(use_duck_shape=False), _limits():  # type: ignore[attr-defined]
            return self._compiled(self._weights[index], hidden, *step.index, step.mask, keys, values, trees, given)

    def _layer(
        self,
        weights: Mapping[str, Tensor],
        hidden: Tensor,
        blocks: Tensor,
        offsets: Tensor,
        mask: Tensor | None,
        keys: Tensor,
        values: Tensor,
        trees: tuple[Tensor, ...] | None,
        given: dict[str, Any],
    ) -> Any:
        """Run one layer; torch.compile traces this. It takes tensors only, because numbers would be specialized."""
        num_rows, window = offsets.shape[0], keys.shape[2] - 1 if mask is None else mask.shape[3]
        kernel = None
        if trees is not None:
            assert self._kernel is not None
            # Decoders with rules are not fused, see `fuse`.
            row_blocks, lens, visible = trees
            kernel = TreeAttention(self._kernel, row_blocks, lens, visible)
        cache = RaggedCache.over([keys], [values])
        index = blocks, offsets
        step = AttentionStep(cache, blocks[:, 0], offsets, mask, window, num_rows, kernel=kernel, index=index)
        return torch.func.functional_call(self._template, dict(weights), (hidden,), {**given, "lanes": step})


def _limits() -> Any:
    config: Any = torch._dynamo.config
    return config.patch(specialize_float=True, recompile_limit=MAX_GRAPHS)


def fuse(decoder: nn.Module, compiler: str = INDUCTOR) -> nn.Module | None:
    """Return a copy of a decoder with fused layers over the same weights; None if its layers differ in structure, or if
    any is not plain causal attention.

    The decoder's attention implementation must be set, because the traced layer copies its configuration.
    """
    config: Any = decoder.config
    assert config._attn_implementation == IMPLEMENTATION
    layers: Sequence[nn.Module] = list(getattr(decoder, "layers", ()))
    if rules_of(decoder) or not are_alike(layers):
        return None
    return with_layers(decoder, FusedLayers(layers, compiler).run_layer)
