"""Wraps a drafter and converts its exceptions to `DrafterError`, so that the engine can continue without it.

Device faults are not converted, because the engine cannot continue after them.
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
    """Raised if the drafter runs out of device memory; the target alone may still have enough."""


class Guarded:
    """Proxy of a drafter; exceptions of its per-sample methods become `DrafterError`."""

    def __init__(self, drafter: Drafter) -> None:
        self.inner = drafter
        for name in ("prefixes", "admit", "prefill", "skip", "draft", "commit", "finished", "extras"):
            setattr(self, name, _blamed()(getattr(drafter, name)))

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def guarded(method: Method) -> Method:
    """Return the method with its drafter wrapped in `Guarded`; with the drafter `none`, the method itself."""
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
    """Return whether the device itself reported the error; torch before 2.8 has no exception type for it."""
    kind = getattr(torch, "AcceleratorError", ())
    return isinstance(error, kind) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))
