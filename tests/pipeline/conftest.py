"""The object store of this folder's tests."""

from __future__ import annotations

import pytest

from pipeline.storage import first_touch
from tests import object_store


@pytest.fixture(scope="session")
def s3() -> object_store.S3:
    return object_store.running()


@pytest.fixture(autouse=True)
def long_first_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for the first answer of a store than jobs do: the store of the tests may run on a busy machine."""
    monkeypatch.setattr(first_touch, "FIRST_TOUCH_S", 600.0)
