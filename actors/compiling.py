"""Which models of a pair are compiled, and when: what `pool.compile` asks for. Knows nothing of how it is done."""

from __future__ import annotations

from collections.abc import Sequence

from configs.load import ConfigError
from configs.schema import EnginePool
from models.contract import TargetModel


def compile_models(pool: EnginePool, models: Sequence[TargetModel]) -> None:
    """Let the models of a pair be compiled as the pool wants it.

    Raises:
        ConfigError: they are to be compiled and cannot be.
    """
    if pool.compile == "never":
        return
    for model in models:
        can_be = model.compile(0.0 if pool.compile == "always" else pool.compile_after_s)
        if pool.compile == "always" and not can_be:
            raise ConfigError(
                f"pool.compile: {model.name} cannot be compiled: that takes a CPU, bfloat16 or float32 weights and "
                "layers of one make; take 'auto'"
            )
