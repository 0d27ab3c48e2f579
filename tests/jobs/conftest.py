"""One private Ray for all tests of this folder: starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from configs.pool import JobSectionConfig
from pipeline.cluster import ray_session
from tests import object_store


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    object_store.running()  # workers get their environment when Ray starts, and some tests keep files in that store
    # What workers print comes when it likes, and would end up in what other tests capture.
    with ray_session.session(JobSectionConfig(num_cpus=2), log_to_driver=False):
        yield


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test whose job starts Ray."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Ray was started for a job that must be refused")

    monkeypatch.setattr(ray_session, "session", refuse)
