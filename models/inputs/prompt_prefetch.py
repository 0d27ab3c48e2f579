"""Prefetch prompts: a thread encodes them while decoding steps run, on a side stream if the device has streams.

A processor call takes as long as many decoding steps, and vision towers synchronize the device. Its gain is unmeasured.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.backends.base import SideStream
from models.inputs.prefix import Prefix


@dataclass(frozen=True)
class PreparedPrompt:
    """Encoded prompt of one sample, one prefix per lane, and the number of feature cache hits."""

    lanes: list[Prefix]
    num_feature_hits: int


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
        return 0 if failed else sum(lane.length for lane in self._future.result()[0].lanes)

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

    def submit(self, prepare: Callable[[], PreparedPrompt]) -> PendingPrompt:
        """Queue `prepare`, which runs on the thread in inference mode and on the side stream."""
        return PendingPrompt(self._executor.submit(self._run, prepare), self._stream)

    def _run(self, prepare: Callable[[], PreparedPrompt]) -> tuple[PreparedPrompt, Any]:
        with torch.inference_mode(), self._stream.use():
            return prepare(), self._stream.record_event()
