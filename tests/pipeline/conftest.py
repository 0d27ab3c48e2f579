"""The object store of this folder's tests."""

from __future__ import annotations

import pytest

from tests import object_store


@pytest.fixture(scope="session")
def s3() -> object_store.S3:
    return object_store.running()
