"""Resets the compiler between model tests, so that tests share no compiled graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    # Models contain reference cycles, and tests count packed weights.
    torch._dynamo.reset()
    gc.collect()
    yield
    torch._dynamo.reset()
    gc.collect()
