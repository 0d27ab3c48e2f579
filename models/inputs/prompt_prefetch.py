"""Prefetch prompts: a thread encodes them while decoding steps run, on a side stream if the device has streams.

A processor call takes as long as many decoding steps, and vision towers synchronize the device. Its gain is unmeasured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.backends.base import SideStream
from models.inputs.clip import Clip
from models.inputs.content import ConditionPair, Content
from models.inputs.packing import PackedInputs
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a model encodes for one sample; the fields are those of `decoding.types.Request`."""

    prompt: str
    images: tuple[NDArray[np.uint8], ...] = ()
    videos: tuple[Clip, ...] = ()
    inputs: PackedInputs | None = None
    condition: NDArray[np.float32] | ConditionPair | int | None = None

    @property
    def content(self) -> Content:
        """A key; prompts with equal keys are encoded alike by every model."""
        features: list[NDArray[np.float32]] = []
        if isinstance(self.condition, ConditionPair):
            features = [self.condition.positive, self.condition.negative]
        elif isinstance(self.condition, np.ndarray):
            features = [self.condition]
        # The type is part of the key because True == 1.
        label: Hashable = (self.prompt, type(self.condition), None if features else self.condition)
        if self.inputs is not None and not (self.images or self.videos):
            return self.inputs.content(label)
        content = Content.shown(self.images, self.videos, label)
        return Content(features, content) if features else content


@dataclass(frozen=True)
class PreparedPrompt:
    """Encoded prompt of one sample, one prefix per lane, and the number of feature cache hits."""

    lanes: list[Prefix]
    num_feature_hits: int

    @property
    def num_tokens(self) -> int:
        """Number of KV positions over all lanes."""
        return sum(lane.length for lane in self.lanes)


Encode = Callable[[Iterable[Prompt]], Iterator[PreparedPrompt | PromptError]]
"""Encodes prompts in order, those that fit together in one forward of a vision encoder; see
`models.contract.TargetModel.encode_prompts`."""


@dataclass(frozen=True, eq=False)
class PendingPrompt:
    """A prompt that is queued, being prepared, or ready."""

    _future: Future[tuple[PreparedPrompt, Any]]
    _stream: SideStream

    @property
    def num_columns(self) -> int | None:
        """Number of KV positions over all lanes; 0 if preparation failed or was cancelled, None before it ends."""
        if not self._future.done():
            return None
        failed = self._future.cancelled() or self._future.exception() is not None
        return 0 if failed else self._future.result()[0].num_tokens

    @property
    def is_queued(self) -> bool:
        """Whether the preparation has not started."""
        return not (self._future.running() or self._future.done())

    @property
    def is_ready(self) -> bool:
        """Whether `take` returns without waiting on the host or on the device."""
        columns = self.num_columns
        return columns is not None and (columns == 0 or self._stream.is_complete(self._future.result()[1]))

    def wait(self, timeout_s: float | None) -> bool:
        """Wait at most `timeout_s` (None: without limit) for the end of the preparation on the host; return whether it
        has ended."""
        return bool(wait([self._future], timeout_s).done)

    def take(self) -> PreparedPrompt:
        """Wait for the prompt and make it readable on the caller's stream; re-raises errors of the preparation."""
        prompt, event = self._future.result()
        values = [value for lane in prompt.lanes for value in (*vars(lane).values(), *lane.deepstack)]
        self._stream.hand_over(event, [value for value in values if isinstance(value, Tensor)])
        return prompt

    def cancel(self) -> None:
        """Cancel the preparation if it has not started."""
        self._future.cancel()


class PromptThread:
    """Prepares prompts in order. One thread serves all engines of a model, because a processor is not thread-safe."""

    def __init__(self, stream: SideStream) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._stream = stream
        self._queue: deque[tuple[Future[Any], Prompt]] = deque()

    def submit(self, prompt: Prompt) -> PendingPrompt:
        """Queue a prompt; `start` prepares it."""
        future: Future[Any] = Future()
        self._queue.append((future, prompt))
        return PendingPrompt(future, self._stream)

    def start(self, encode: Encode) -> None:
        """Prepare all queued prompts with `encode` on the thread, in inference mode and on the side stream."""
        self._executor.submit(self._prepare, encode)

    def _prepare(self, encode: Encode) -> None:
        started: deque[Future[Any]] = deque()
        while self._queue:
            try:
                with torch.inference_mode(), self._stream.use():
                    for prompt in encode(self._started(started)):
                        future = started.popleft()
                        if isinstance(prompt, PromptError):
                            future.set_exception(prompt)
                        else:
                            future.set_result((prompt, self._stream.record_event()))
            except BaseException as error:
                if not started:  # the stream itself failed
                    next(self._started(started), None)
                while started:
                    started.popleft().set_exception(error)

    def _started(self, started: deque[Future[Any]]) -> Iterator[Prompt]:
        """Take prompts from the queue while there are any, and append their futures to `started`."""
        while self._queue:
            future, prompt = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                started.append(future)
                yield prompt
