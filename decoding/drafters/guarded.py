"""Wraps a drafter: its exceptions become `DrafterError`, so that the engine can continue without it.

Device faults are not wrapped, because nothing can continue after them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from decoding.contracts import Drafter, Method
from decoding.errors import DrafterError
from models.inputs.processing import PromptError


class DrafterOutOfMemory(DrafterError, torch.OutOfMemoryError):
    """The device has no memory for the drafter's work; the target may still have enough."""


class Guarded:
    """Forwards to a drafter; exceptions on a sample become a `DrafterError`."""

    def __init__(self, drafter: Drafter) -> None:
        self.inner = drafter
        for name in ("prefixes", "admit", "prefill", "skip", "draft", "commit", "extras"):
            setattr(self, name, _blamed()(getattr(drafter, name)))

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def guarded(method: Method) -> Method:
    """The method with its drafter guarded; plain decoding has nothing to guard."""
    if method.drafter.name == "none":
        return method
    return replace(method, drafter=Guarded(method.drafter))  # type: ignore[arg-type]


@contextlib.contextmanager
def _blamed() -> Iterator[None]:
    """Convert exceptions of the block to `DrafterError`, except refused prompts and device faults."""
    try:
        yield
    except (PromptError, DrafterError):
        raise
    except torch.OutOfMemoryError as error:
        raise DrafterOutOfMemory(str(error)) from error
    except Exception as error:
        if is_device_fault(error):
            raise
        raise DrafterError(f"the drafter failed: {type(error).__name__}: {error}") from error


def is_device_fault(error: Exception) -> bool:
    """Whether the device itself reported the error; torch before 2.8 has no type for that."""
    kind = getattr(torch, "AcceleratorError", ())
    return isinstance(error, kind) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))
