"""Speculative decoding, batched: the engine, its values, and the four families of parts a method is made of."""

from decoding.contracts import Method
from decoding.engine import Engine
from decoding.types import Completion, Request, RequestError, Sampling, Telemetry

__all__ = ["Completion", "Engine", "Method", "Request", "RequestError", "Sampling", "Telemetry"]
