"""Decides which models of a pair are compiled or captured when an engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.load import ConfigError
from configs.schema import EnginePool
from models.contract import TargetModel

if TYPE_CHECKING:
    from torch import nn


MIN_COMPILED_BYTES = 1 << 28
"""Weights of the largest decoder from which on `auto` compiles: smaller models gain less than compiling takes."""


def compile_models(pool: EnginePool, models: Sequence[TargetModel]) -> None:
    """Let the models of a pair be compiled or captured as the pool wants it. `auto` follows from the weights and the
    machine alone, so that all engines of a job on one type of machine decide alike, before their first row.

    Raises:
        ConfigError: they are to be and cannot be.
    """
    largest = max((num_bytes(model.decoder) for model in models), default=0)
    compiles = pool.compile == "always" or (pool.compile == "auto" and largest >= MIN_COMPILED_BYTES)
    for model in models:
        if pool.capture and not model.capture():
            raise ConfigError(
                f"pool.capture: {model.name} cannot be captured: that takes one CUDA device, "
                f"and it is on {model.device}"
            )
        if compiles and not model.compile() and pool.compile == "always":
            raise ConfigError(
                f"pool.compile: {model.name} cannot be compiled: that takes a CPU, bfloat16 or float32 weights and "
                "layers of one make; take 'auto'"
            )


def num_bytes(decoder: nn.Module) -> int:
    """Of a decoder's weights."""
    return sum(one.numel() * one.element_size() for one in decoder.parameters())
