"""Batched speculative decoding: engine, requests and completions, and the interfaces of a method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoding.types import Completion, Request, RequestError, Sampling, Telemetry

if TYPE_CHECKING:
    from decoding.contracts import Method
    from decoding.engine import Engine
else:

    def __getattr__(name):
        """Import `Engine` and `Method` lazily, because they import torch and transformers."""
        if name == "Engine":
            from decoding.engine import Engine

            return Engine
        if name == "Method":
            from decoding.contracts import Method

            return Method
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Completion", "Engine", "Method", "Request", "RequestError", "Sampling", "Telemetry"]
