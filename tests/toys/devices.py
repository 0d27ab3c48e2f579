"""The device of the toys' targets and drafters; oracles stay on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from models.contract import TargetModel

_DEVICES = [torch.device("cpu")]
Model = TypeVar("Model", bound=TargetModel)


@contextmanager
def on(name: str) -> Iterator[None]:
    """Make targets and drafters on this device."""
    _DEVICES.append(torch.device(name))
    try:
        yield
    finally:
        _DEVICES.pop()


def device() -> torch.device:
    return _DEVICES[-1]


def captured(model: Model) -> Model:
    """The same model, whose steps are captured on a GPU."""
    assert model.capture() == (model.device.type == "cuda")
    return model
