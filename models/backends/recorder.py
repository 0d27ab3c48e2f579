"""Define the interface of recorders, which capture launched kernels and replay them on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Out = TypeVar("Out")


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
