"""One private Ray for all tests of this folder: starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from configs.schema import Job
from pipeline.ray_session import session


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    with session(Job(num_cpus=2)):
        yield
