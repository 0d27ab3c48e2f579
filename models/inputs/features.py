"""Cache visual features by the content of images and videos.

Overrides `get_image_features` and `get_video_features`, which all vision-language models of transformers have, in a
shallow copy of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.utils import ModelOutput

from models.inputs.content import Content, Recent

METHODS = ("get_image_features", "get_video_features")
READ = ("pooler_output", "deepstack_features")
"""Fields of an encoder's output that models read; other fields are not cached."""
Features = dict[tuple[str, int], Any]
"""Features by method name and number of earlier calls for the same content."""


class FeatureCache:
    """Least-recently-used cache of a model's visual features, up to `max_bytes`, keys included. Not thread-safe."""

    def __init__(self, model: nn.Module, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_hits = 0
        self._model = _with_methods(model, self._call)
        self._recent: Recent[Features] = Recent(max_bytes)
        self._cached: Features = {}
        self._computed: Features = {}
        self._num_calls = 0

    @contextmanager
    def model_for(self, content: Content) -> Iterator[nn.Module]:
        """Yield a copy of the model that caches features; within the block it may encode `content` only."""
        cached = self._recent.get(content)
        self._cached, self._computed, self._num_calls = cached or {}, {}, 0
        try:
            yield self._model
            computed = self._computed
        finally:
            self._cached, self._computed = {}, {}
        if computed and not cached:
            self._recent.keep(content, computed, sum(_storages(computed).values()))

    def _call(self, method: str, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return features from the cache, or compute and store them."""
        key = method, self._num_calls
        self._num_calls += 1
        if key in self._cached:
            self.num_hits += 1
            return self._cached[key]
        features = compute(*args, **kwargs)
        self._computed[key] = _reduce(features)
        return features


def _with_methods(model: nn.Module, call: Callable[..., Any]) -> nn.Module:
    """Return a copy of `model` with the same weights; its forward calls `call(name, method, …)` for `METHODS`.

    The methods stay bound to the original model, so their nested calls are not cached.
    """
    owner = getattr(model, "model", model)
    inner = copy.copy(owner)
    for name in METHODS:
        if (method := getattr(owner, name, None)) is not None:
            inner.__dict__[name] = partial(call, name, method)
    if owner is model:
        return inner
    outer = copy.copy(model)
    outer.__dict__["_modules"] = {**model._modules, "model": inner}
    return outer


def _reduce(features: Any) -> Any:
    """Reduce an encoder's output to the fields in `READ`."""
    if not isinstance(features, ModelOutput) or features.get("pooler_output") is None:
        return features
    return type(features)(**{name: features[name] for name in READ if features.get(name) is not None})


def _storages(values: Any) -> dict[int, int]:
    """Return the bytes of each storage of the tensors in nested `values`, by address; views share a storage."""
    if isinstance(values, Tensor):
        memory = values.untyped_storage()
        return {memory.data_ptr(): memory.nbytes()}
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    sizes: dict[int, int] = {}
    for value in inner:
        sizes |= _storages(value)
    return sizes
