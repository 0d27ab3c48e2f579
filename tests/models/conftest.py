"""What tests of models share: a compiler that remembers nothing of other tests."""

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
    # Models lie in circles; others' tests count what is packed.
    gc.collect()
