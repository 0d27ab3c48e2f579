"""Run the layers of a decoder through one shared function, without changes to the decoder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.backends.attention import AttentionStep
from models.backends.states.layers import is_recurrent

NOT_COMPILED = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)
"""Errors of torch.compile; forwards then run uncompiled."""
RunLayer = Callable[[int, Tensor, AttentionStep, dict[str, Any]], Any]
"""Layer index, states (r, N, D), attention step, the decoder's other keyword arguments → output of the layer."""


class SharedLayer(nn.Module):
    """Layer of a copied decoder, which runs the shared function with its own index."""

    def __init__(self, index: int, inner: nn.Module, run: RunLayer) -> None:
        super().__init__()
        self.inner = inner
        self._run = run
        self._index = index

    def __getattr__(self, name: str) -> Any:
        # Decoders read attributes of their layers, such as the attention type.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, hidden: Tensor, **arguments: Any) -> Any:
        step: AttentionStep = arguments.pop("lanes")
        return self._run(self._index, hidden, step, arguments)


def with_layers(decoder: nn.Module, run: RunLayer) -> nn.Module:
    """Return a shallow copy: the same parts and weights, with layers that run `run`."""
    view = copy.copy(decoder)
    view._modules = dict(decoder._modules)
    layers: Sequence[nn.Module] = decoder.layers  # type: ignore[assignment]
    view.layers = nn.ModuleList(SharedLayer(index, layer, run) for index, layer in enumerate(layers))
    return view


def template_of(layers: Sequence[nn.Module]) -> nn.Module:
    """Return a layer without weights, with index 0 in a KV cache of one layer."""
    template = copy.deepcopy(layers[0]).to("meta")
    for module in template.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0  # type: ignore[assignment]
    return template


def are_alike(layers: Sequence[nn.Module]) -> bool:
    """Return whether one template serves all layers: equal structure, no buffers, and no states of their own."""
    has_buffers = any(True for layer in layers for _ in layer.buffers())
    if has_buffers or any(is_recurrent(module) for layer in layers for module in layer.modules()):
        return False
    return bool(layers) and all(_structure(layer) == _structure(layers[0]) for layer in layers)


def _structure(layer: nn.Module) -> list[object]:
    """Return what layers must share to run one graph: modules, their constants and hooks, shapes of weights."""
    parts: list[object] = []
    for name, module in layer.named_modules():
        constants = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str)) and key != "layer_idx"
        }
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        parts.append((name, type(module), constants, hooks))
    return [*parts, *((name, weight.shape, weight.dtype, weight.device) for name, weight in layer.named_parameters())]


def first_lines(error: Exception, num_lines: int = 2) -> str:
    """Return the first lines of an error of torch: the component of torch and the error, without advice."""
    return " ".join((str(error) or type(error).__name__).splitlines()[:num_lines])
