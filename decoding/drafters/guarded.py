"""Wraps a drafter: its exceptions become `DrafterError`, so that the engine can continue without it.

Device faults are not wrapped, because nothing can continue after them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decoding.contracts import Drafter, EngineSpec, Judgement, Method, Probe
from decoding.errors import DrafterError
from decoding.tree import Frontier, Verdict
from decoding.types import Request
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.kv.lanes import SlotBatch

NOT_THE_DRAFTERS: tuple[type[Exception], ...] = (PromptError, DrafterError)


class DrafterOutOfMemory(DrafterError, torch.OutOfMemoryError):
    """The device has no memory for the drafter's work; the target may still have enough."""


class Guarded:
    """Calls `drafter`; exceptions on a sample become a `DrafterError`."""

    def __init__(self, drafter: Drafter) -> None:
        self.inner = drafter
        self.name = drafter.name
        self.needs_hidden = drafter.needs_hidden
        self.needs_attention = drafter.needs_attention

    @property
    def num_forwards(self) -> int:
        return self.inner.num_forwards

    def open(self, spec: EngineSpec) -> None:
        self.inner.open(spec)

    def prefixes(self, request: Request, probe: Probe) -> list[Prefix]:
        with blamed():
            return self.inner.prefixes(request, probe)

    def admit(self, slots: SlotBatch, first: Tensor, probes: Sequence[Probe]) -> None:
        with blamed():
            self.inner.admit(slots, first, probes)

    def prefill(self, slots: SlotBatch, prefixes: Sequence[list[Prefix]]) -> None:
        with blamed():
            self.inner.prefill(slots, prefixes)

    def skip(self, slots: SlotBatch) -> None:
        with blamed():
            self.inner.skip(slots)

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        with blamed():
            return self.inner.draft(slots, frontier)

    def commit(self, judgement: Judgement, verdict: Verdict) -> None:
        with blamed():
            self.inner.commit(judgement, verdict)

    def extras(self, slot: int) -> dict[str, Any]:
        with blamed():
            return self.inner.extras(slot)


def guarded(method: Method) -> Method:
    """The method with its drafter guarded; plain decoding has nothing to guard."""
    return method if method.drafter.name == "none" else replace(method, drafter=Guarded(method.drafter))


@contextlib.contextmanager
def blamed() -> Iterator[None]:
    """Convert exceptions of the block to `DrafterError`, except refused prompts and device faults."""
    try:
        yield
    except NOT_THE_DRAFTERS:
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
