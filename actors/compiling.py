"""Which models of a pair are compiled or captured, and when: what the pool asks for. Knows nothing of how."""

from __future__ import annotations

from collections.abc import Sequence

from configs.load import ConfigError
from configs.schema import EnginePool
from models.contract import TargetModel


def compile_models(pool: EnginePool, models: Sequence[TargetModel]) -> None:
    """Let the models of a pair be compiled or captured as the pool wants it.

    Raises:
        ConfigError: they are to be and cannot be.
    """
    for model in models:
        if pool.capture and not model.capture():
            raise ConfigError(
                f"pool.capture: {model.name} cannot be captured: that takes one CUDA device, "
                f"and it is on {model.device}"
            )
        if pool.compile == "never":
            continue
        can_be = model.compile(0.0 if pool.compile == "always" else pool.compile_after_s)
        if pool.compile == "always" and not can_be:
            raise ConfigError(
                f"pool.compile: {model.name} cannot be compiled: that takes a CPU, bfloat16 or float32 weights and "
                "layers of one make; take 'auto'"
            )
