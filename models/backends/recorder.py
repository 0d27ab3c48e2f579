"""Define the interface of recorders, which capture launched kernels and replay them on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of slots of recorded steps, and of rows of recorded forwards; larger ones are launched."""
Out = TypeVar("Out")
_in_whole_step: ContextVar[bool] = ContextVar("in_whole_step", default=False)


@contextmanager
def whole_step() -> Iterator[None]:
    """Within the `with` block, forwards belong to a step that is captured whole: decoders capture none of their own, so
    that a run before the capture launches, and compiles, the kernels of the capture."""
    token = _in_whole_step.set(True)
    try:
        yield
    finally:
        _in_whole_step.reset(token)


def is_in_whole_step() -> bool:
    """Return whether the calling thread is within a `whole_step` block."""
    return _in_whole_step.get()


class KernelRecorder(Protocol):
    """Captures the kernels that a function launches."""

    @property
    def is_recording(self) -> bool:
        """Whether the calling thread is within a function that a recorder of this device captures."""
        ...

    def record(self, run: Callable[[], Out]) -> tuple[Out, Callable[[], None]]:
        """Capture `run`, which launches nothing; returns its output, whose tensors have no values yet, and a function
        that replays the kernels."""
        ...

    def run_beside(self, run: Callable[[], Out]) -> Out:
        """Run a function on the stream on which functions are captured, after all work of the current stream; later
        work of the current stream follows it."""
        ...
