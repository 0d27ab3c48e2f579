"""Finds the recurrent layers of a decoder, and makes them read and write the states of rows.

A layer of transformers runs as it is. The functions that it calls are globals of its module; they are replaced once per
module, and the replacements call the originals unless a forward of the engine runs in the calling thread.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from torch import nn

from models.backends.states.memory import StatesStep
from models.backends.states.rules import Function, apply_delta, convolve, scan

CONVOLUTION, DELTA, MAMBA = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
"""Functions that recurrent layers call if they are given no cache."""
SINGLE = {DELTA: "torch_recurrent_gated_delta_rule", MAMBA: "mamba2_selective_state_update"}
"""The forms of these functions for single tokens."""
UPDATE = "causal_conv1d_update"
OTHER_RULES = re.compile(r"scan|rule|chunk|recurrent|update")
"""Names of functions of other rules, such as those of Mamba 1; layers that call them have states that are unknown."""
KINDS = {DELTA: "gated delta rule", MAMBA: "Mamba 2", CONVOLUTION: "short convolution"}

_running: ContextVar[StatesStep | None] = ContextVar("states of the running forward", default=None)
_lock = threading.Lock()
_installed: set[str] = set()


@contextmanager
def running(step: StatesStep) -> Iterator[None]:
    """Within the `with` block, recurrent layers that run in this thread read and write the states of `step`."""
    token = _running.set(step)
    try:
        yield
    finally:
        _running.reset(token)


def recurrent_layers(decoder: nn.Module) -> dict[int, str]:
    """Return the recurrent layers of a decoder whose functions are known: by index, the name of their rule."""
    return {int(module.layer_idx): kind for module, kind in _found(decoder)}  # type: ignore[arg-type]


def install(decoder: nn.Module) -> None:
    """Make the recurrent layers of a decoder read and write states within `running`; more calls change nothing."""
    for module, _ in _found(decoder):
        _replace(sys.modules[type(module).__module__])
        if _note_layer not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_note_layer)


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is a recurrent layer whose functions are known."""
    return _rule_of(module) is not None


def _found(decoder: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in getattr(decoder, "layers", nn.Module()).modules():
        if (kind := _rule_of(module)) is not None:
            yield module, kind


def _rule_of(module: nn.Module) -> str | None:
    layer: Any = type(module)
    if not hasattr(module, "layer_idx") or (kind := _kind_of(layer)) is None:
        return None
    num_convolutions = sum(isinstance(child, nn.Conv1d) for child in module.children())
    return kind if num_convolutions == 1 else None


@functools.cache
def _kind_of(layer: Any) -> str | None:
    """Return the rule of a class of layers, by the functions that its forward calls; None if it has no known one."""
    code = getattr(inspect.unwrap(layer.forward), "__code__", None)
    called, known = set(getattr(code, "co_names", ())), vars(sys.modules[layer.__module__])
    if CONVOLUTION not in called or CONVOLUTION not in known:
        return None
    for name, single in SINGLE.items():
        if name in called:
            return KINDS[name] if name in known and single in known else None
    others = {name for name in called - {UPDATE} if OTHER_RULES.search(name) and callable(known.get(name))}
    return None if others else KINDS[CONVOLUTION]


def _note_layer(module: nn.Module, _: Any) -> None:
    if (step := _running.get()) is not None:
        step.layer = int(module.layer_idx)  # type: ignore[arg-type]


def _replace(module: ModuleType) -> None:
    with _lock:
        if module.__name__ in _installed:
            return
        functions = vars(module)
        rules: dict[str, Function] = {CONVOLUTION: convolve}
        if DELTA in functions:
            rules[DELTA] = functools.partial(apply_delta, recurrent=functions[SINGLE[DELTA]])
        if MAMBA in functions:
            rules[MAMBA] = functools.partial(scan, update=functions[SINGLE[MAMBA]])
        for name, rule in rules.items():
            setattr(module, name, _dispatched(functions[name], rule))
        _installed.add(module.__name__)


def _dispatched(original: Function, rule: Function) -> Function:
    """Return a function that runs the rule within `running`, and `original` elsewhere."""

    @functools.wraps(original)
    def run(*args: Any, **options: Any) -> Any:
        step = _running.get()
        return original(*args, **options) if step is None else rule(step, original, *args, **options)

    return run
