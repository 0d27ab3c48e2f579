"""A cache of visual features by the contents of images and videos.

Wraps `get_image_features` and `get_video_features`, which all vision-language models of transformers have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.utils import ModelOutput

from models.inputs.content import Content, Recent

DOORS = ("get_image_features", "get_video_features")
READ = ("pooler_output", "deepstack_features")
"""Parts of an encoder's output that models read; others are not cached."""
Features = dict[tuple[str, int], Any]
"""Keyed by method, and by how often it was called before for the same content."""


class FeatureCache:
    """The least recently used features of `model`, up to `max_bytes`, keys included. One thread at a time."""

    def __init__(self, model: nn.Module, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_hits = 0
        self._recent: Recent[Features] = Recent(max_bytes)
        self._known: Features = {}
        self._made: Features | None = None
        self._num_passed = 0
        self._is_inside = False
        owner = getattr(model, "model", model)
        for door in DOORS:
            inner = getattr(owner, door, None)
            if inner is not None and max_bytes > 0:
                setattr(owner, door, partial(self._pass, door, inner))

    @contextmanager
    def showing(self, content: Content) -> Iterator[None]:
        """While the block runs, the model is shown `content` and nothing else."""
        if not self.max_bytes:
            yield
            return
        held = self._recent.get(content)
        self._known, self._made, self._num_passed = held or {}, {}, 0
        try:
            yield
            made = self._made
        finally:
            self._known, self._made = {}, None
        if made and not held:
            self._recent.keep(content, made, sum(_storages(made).values()))

    def _pass(self, door: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Features from the cache, or computed and stored; nested calls and content without a key are computed."""
        if self._made is None or self._is_inside:
            return inner(*args, **kwargs)
        key = door, self._num_passed
        self._num_passed += 1
        if key in self._known:
            self.num_hits += 1
            return self._known[key]
        self._is_inside = True
        try:
            features = inner(*args, **kwargs)
        finally:
            self._is_inside = False
        self._made[key] = _without_the_rest(features)
        return features


def _without_the_rest(features: Any) -> Any:
    """An encoder's output with only the parts that are read."""
    if not isinstance(features, ModelOutput) or features.get("pooler_output") is None:
        return features
    return type(features)(**{name: features[name] for name in READ if features.get(name) is not None})


def _storages(values: Any) -> dict[int, int]:
    """Bytes of all memory that the tensors in nested `values` hold on to, by its place; views share theirs."""
    if isinstance(values, Tensor):
        memory = values.untyped_storage()
        return {memory.data_ptr(): memory.nbytes()}
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    found: dict[int, int] = {}
    for value in inner:
        found |= _storages(value)
    return found
