"""Speculative decoding, batched: the engine, its values, and the four families of parts a method is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoding.types import Completion, Request, RequestError, Sampling, Telemetry

if TYPE_CHECKING:
    from decoding.contracts import Method
    from decoding.engine import Engine
else:

    def __getattr__(name):
        """`Engine` and `Method` bring torch and transformers along, seconds that a process without an engine saves."""
        if name == "Engine":
            from decoding.engine import Engine

            return Engine
        if name == "Method":
            from decoding.contracts import Method

            return Method
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Completion", "Engine", "Method", "Request", "RequestError", "Sampling", "Telemetry"]
