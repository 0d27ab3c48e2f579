"""A thread that makes prompts while steps run, on a stream of its own where the device has streams.

Processors keep a host busy for as long as many steps take, and vision towers wait for their own numbers; neither has to
hold up a step. What is made is handed over to the stream of whoever takes it. Knows prompts; nothing of who wants
them, and when. Unmeasured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.inputs.prefix import Prefix


@dataclass(frozen=True)
class Made:
    """The prompt for each lane, and how many visual features came from memory for it."""

    lanes: list[Prefix]
    num_feature_hits: int


Make = Callable[[], Made]


class SideStream:
    """One stream beside the one that steps run on; where the device has none, nothing at all."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Weights may still be on their way.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def use(self) -> AbstractContextManager[object]:
        """Within this, the calling thread's work goes there."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        """What is over once all that is there now is; None where it is already."""
        return None if self._stream is None else self._stream.record_event()

    def is_past(self, mark: Any) -> bool:
        """Whether a mark was reached."""
        return mark is None or bool(mark.query())

    def hand_over(self, mark: Any, tensors: Sequence[Tensor]) -> None:
        """Let the calling thread's stream use tensors that were made here before a mark."""
        if mark is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(mark)
        for tensor in tensors:
            # Otherwise this stream would take their memory back as soon as nobody holds them, still to be read there.
            tensor.record_stream(current)


class Coming:
    """A prompt that is being made, or waits for its turn."""

    def __init__(self, future: Future[tuple[Made, Any]], stream: SideStream) -> None:
        self._future = future
        self._stream = stream
        self._num_columns: int | None = None

    @property
    def num_columns(self) -> int | None:
        """Of all lanes; 0 where it was refused or failed, and None as long as it is not made."""
        if self._num_columns is None and self._future.done():
            failed = self._future.cancelled() or self._future.exception() is not None
            self._num_columns = 0 if failed else sum(lane.length for lane in self._future.result()[0].lanes)
        return self._num_columns

    @property
    def is_over(self) -> bool:
        """Whether whoever takes it waits for nothing, on the host or on the device."""
        if not self._future.done():
            return False
        return not self.num_columns or self._stream.is_past(self._future.result()[1])

    def take(self) -> Made:
        """Wait until it is made; raises what making it raised. What comes is usable by the caller's stream."""
        made, mark = self._future.result()
        self._stream.hand_over(mark, [tensor for lane in made.lanes for tensor in _tensors(lane)])
        return made

    def forget(self) -> None:
        """Nobody wants it any more: it is not made if its turn has not come."""
        self._future.cancel()


class PromptThread:
    """Makes one prompt after the other, in the order in which they were begun. One for a model and all of its engines:
    a model's front end is used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._stream = SideStream(device)

    def begin(self, make: Make) -> Coming:
        """Have a prompt made after those that were begun before."""
        return Coming(self._executor.submit(self._run, make), self._stream)

    def _run(self, make: Make) -> tuple[Made, Any]:
        with torch.inference_mode(), self._stream.use():
            return make(), self._stream.mark()


def _tensors(lane: Prefix) -> list[Tensor]:
    values = (lane.token_ids, lane.embeds, lane.positions, lane.visual, lane.padding, *lane.deepstack)
    return [one for one in values if one is not None]
