"""Compute visual features for the forwards of several prompts together, and cache them by content.

Overrides `get_image_features` and `get_video_features`, which all vision-language models of transformers have, in a
shallow copy of the model: a forward stops at the first call whose features are missing, the calls of all stopped
forwards run together (`models.inputs.vision`), and the forwards run again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from models.inputs.content import Content, Recent
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.inputs.vision import EncoderCall, VisionEncoder

METHODS = ("get_image_features", "get_video_features")
Features = dict[tuple[str, int], Any]
"""Features, or the error of their call, by method name and number of earlier calls for the same content."""


@dataclass(eq=False)
class MediaPrompt:
    """A prompt with images or videos of `content`; `embed` runs its forward with a copy of the model.

    `num_hits` is the number of its features that were cached or computed for an equal content.
    """

    content: Content
    embed: Callable[[nn.Module], Prefix]
    num_hits: int = 0


class _MissingFeatures(Exception):
    """Raised in a forward at a call whose features are not computed yet."""

    def __init__(self, key: tuple[str, int], call: EncoderCall) -> None:
        self.key, self.call = key, call


class VisualFeatures:
    """Features of a model's prompts, with a least-recently-used cache after `keep`. Not thread-safe. `name` is for log
    messages."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.num_hits = 0
        self.encoder = VisionEncoder(model, name)
        self._model = model
        self._recent: Recent[Features] = Recent(0)

    def keep(self, max_bytes: int) -> None:
        """Cache features from now on, up to `max_bytes`, keys included; 0 is no cache."""
        self._recent = Recent(max_bytes)

    def has(self, content: Content) -> bool:
        """Return whether features of `content` are cached."""
        return self._recent.get(content) is not None

    def embed(self, prompts: Sequence[MediaPrompt]) -> list[Prefix | PromptError]:
        """Run the forwards of `prompts`; features of equal contents are computed once and dropped at the end."""
        results: dict[int, Prefix | PromptError] = {}
        known: dict[Content, Features] = {}
        for prompt in prompts:
            known.setdefault(prompt.content, dict(self._recent.get(prompt.content) or {}))
        waiting = list(range(len(prompts)))
        num_computed = dict.fromkeys(waiting, 0)
        while waiting:
            missing: dict[Content, tuple[int, _MissingFeatures]] = {}
            stopped: list[int] = []
            for index in waiting:
                prompt = prompts[index]
                if prompt.content in missing:
                    stopped.append(index)
                    continue
                try:
                    results[index], num_calls = self._run(prompt, known[prompt.content])
                except _MissingFeatures as stop:
                    missing[prompt.content] = index, stop
                    stopped.append(index)
                except PromptError as refusal:
                    # A new error, because a traceback would keep tensors alive.
                    results[index] = PromptError(str(refusal))
                else:
                    prompt.num_hits = num_calls - num_computed[index]
                    self.num_hits += prompt.num_hits
                    self._keep(prompt.content, known[prompt.content])
            # One method at a time: prompts with images and videos then run their videos with those of other prompts.
            method = min((at.call.method for _, at in missing.values()), default="")
            now = [(index, at) for index, at in missing.values() if at.call.method == method]
            for (index, at), features in zip(now, self.encoder.run([at.call for _, at in now]), strict=True):
                known[prompts[index].content][at.key] = features
                num_computed[index] += 1
            waiting = stopped
        return [results[index] for index in range(len(prompts))]

    def _run(self, prompt: MediaPrompt, features: Features) -> tuple[Prefix, int]:
        """Return the prompt and its number of calls; raises _MissingFeatures and PromptError."""
        num_calls = 0

        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            key = method, num_calls
            num_calls += 1
            if key not in features:
                raise _MissingFeatures(key, EncoderCall(method, args, kwargs))
            if isinstance(features[key], Exception):
                raise features[key]
            return features[key]

        prefix = prompt.embed(_with_methods(self._model, call))
        if not num_calls:
            self.encoder.runs_by_prompt(METHODS[0], "the model's forward calls neither it nor get_video_features")
        return prefix, num_calls

    def _keep(self, content: Content, features: Features) -> None:
        if features and not self.has(content):
            self._recent.keep(content, features, sum(_storages(features).values()))


def _with_methods(model: nn.Module, call: Callable[..., Any]) -> nn.Module:
    """Return a copy of `model` with the same weights; its forward calls `call(name, …)` for `METHODS`."""
    owner = getattr(model, "model", model)
    inner = copy.copy(owner)
    for name in METHODS:
        if hasattr(owner, name):
            inner.__dict__[name] = partial(call, name)
    if owner is model:
        return inner
    outer = copy.copy(model)
    outer.__dict__["_modules"] = {**model._modules, "model": inner}
    return outer


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
