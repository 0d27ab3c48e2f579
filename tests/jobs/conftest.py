"""One private Ray for all tests of this folder: starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from configs.pool import Job
from pipeline.cluster.ray_session import session
from tests import object_store


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    object_store.running()  # workers get their environment when Ray starts, and some tests keep files in that store
    # What workers print comes when it likes, and would end up in what other tests capture.
    with session(Job(num_cpus=2), log_to_driver=False):
        yield
