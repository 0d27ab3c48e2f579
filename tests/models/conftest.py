"""Resets the compiler between model tests, so that tests share no compiled graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    # Models contain reference cycles; other tests count packed weights.
    gc.collect()
